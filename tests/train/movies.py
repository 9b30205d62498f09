"""An ml folder of a few made-up users, each of whom goes through the movies in a circle."""

from pathlib import Path

NUM_MOVIES, NUM_USERS, LENGTH = 24, 30, 14


def write_movies(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(NUM_USERS):
        for place in range(LENGTH):
            movie = (5 * user + place) % NUM_MOVIES
            lines.append(f"{user + 1},{movie + 100},{(movie + user) % 5 + 1}.0,{1000 + place}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [
        f'{movie + 100},"Film {movie} ({1990 + movie % 7})",Drama|Comedy' for movie in range(NUM_MOVIES)
    ]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    return folder
