"""TorchRec's column names for the Criteo and MovieLens files."""

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
TOTAL_TRAINING_SAMPLES = 4_195_197_692
"""Criteo Terabyte rows in days 0 to 22."""
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{index}" for index in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{index}" for index in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
