from meshrec.reports.page import to_page


def test_names_cannot_end_the_script():
    assert to_page("plan.js", "</script><b>").count("</script>") == to_page("plan.js", "").count("</script>")
