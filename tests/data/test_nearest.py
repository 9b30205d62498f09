from meshrec.data.nearest import did_you_mean, nearest


def test_the_nearest_name():
    names = ["train", "tune", "Evaluate"]
    assert nearest("trian", names) == "train"
    assert nearest("evaluat", names) == "Evaluate"
    assert nearest("xyz", names) is None
    assert did_you_mean("tun", names) == " Did you mean tune?"
    assert did_you_mean("xyz", names) == ""
