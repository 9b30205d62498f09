import pytest

from meshrec.data import DataError
from meshrec.data.faults import Faults
from meshrec.data.movielens_data import load_folder

# The same three ratings and two movies in every form.
FORMS = {
    "csv": {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,10,4.0,100\n2,10,3.5,50\n1,20,5.0,90\n",
        "movies.csv": 'movieId,title,genres\n10,"Heat, The (1995)",Action|Crime\n20,Odd,(no genres listed)\n',
    },
    "dat": {
        "ratings.dat": "1::10::4::100\n2::10::3.5::50\n1::20::5::90\n",
        "movies.dat": "10::Heat, The (1995)::Action|Crime\n20::Odd::unknown\n",
    },
    "100k": {
        "u.data": "1\t10\t4\t100\n2\t10\t3.5\t50\n1\t20\t5\t90\n",
        "u.item": "10|Heat, The (1995)|01-Jan-1995||url|" + "|".join("0100001" + "0" * 12) + "\n"
        "20|Odd|||url|" + "|".join("0" * 19) + "\n",
    },
    "recbole": {
        "ml.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "1\t10\t4\t100\n2\t10\t3.5\t50\n1\t20\t5\t90\n",
        "ml.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "10\tHeat, The\t1995\tAction Crime\n20\tOdd\t\t\n",
    },
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form, tmp_path):
    raw = load_folder(write(tmp_path, FORMS[form]), Faults("raise"))
    ratings = raw.ratings.to_pydict()
    assert ratings["rating"] == [4.0, 3.5, 5.0]
    assert ratings["time"] == [100, 50, 90]
    assert [int(user) for user in ratings["user"]] == [1, 2, 1]
    movies = raw.movies.to_pydict()
    assert [int(movie) for movie in movies["movie"]] == [10, 20]
    assert movies["year"] == [1995, None]
    assert [genres or [] for genres in movies["genres"]] == [["Action", "Crime"], []]


@pytest.mark.parametrize("form", ["100k", "recbole"])
def test_movies_may_be_missing(form, tmp_path):
    files = dict(list(FORMS[form].items())[:1])
    assert load_folder(write(tmp_path, files), Faults("raise")).movies.num_rows == 0


def test_titles_in_latin_1(tmp_path):
    files = {**FORMS["dat"], "movies.dat": "10::Léon (1994)::Crime\n20::B (2001)::Drama\n"}
    assert load_folder(write(tmp_path, files), Faults("raise")).movies["year"].to_pylist() == [1994, 2001]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"ratings.csv.*\[\]"),
        ({"ratings.csv": FORMS["csv"]["ratings.csv"]}, "movies"),
        ({"u.data": ""}, "u.data"),
        ({"u.data": "1\t10\t4\t100\n2\t10\t\t50\n"}, "u.data.*'rating'.*row 1"),
        ({"u.data": "1\t10\tgood\t100\n"}, "u.data.*line 1.*'rating'.*'good'"),
        ({"ratings.csv": "user,movie\n1,2\n"}, r"\['userId'"),
    ],
)
def test_damage_is_named(files, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_folder(write(tmp_path, files), Faults("raise"))


def test_damaged_ratings_are_skipped_on_request(tmp_path):
    faults = Faults("skip")
    text = "1\t10\t4\t100\n2\t10\t\t50\n1\t20\tgood\t90\n1\n"
    assert load_folder(write(tmp_path, {"u.data": text}), faults).ratings.num_rows == 1
    assert sum(faults.skipped.values()) == 3


def test_folders_are_folders(tmp_path):
    with pytest.raises(DataError, match="folder"):
        load_folder(tmp_path / "none", Faults("raise"))
    with pytest.raises(DataError, match="ratings"):
        load_folder(write(tmp_path, {"u.data": "1\t10\t\t100\n"}), Faults("skip"))
