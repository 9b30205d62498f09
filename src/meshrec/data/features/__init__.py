"""Features: rules that convert table columns to model inputs, in the same way in training and serving.

A `Features` object lists labels and features. `Features.fit` computes vocabularies, quantiles and means from
training data in a single pass, and `Features.save` writes the result to a JSON file. Users can look up the
table row of a value, as in ``features["user"].row_of("user-7")``.
"""

from meshrec.data.features.column_feature import UnfittedError
from meshrec.data.features.derived import Buckets, Cross, DatePart
from meshrec.data.features.features import ColumnFeature, Features, FitState
from meshrec.data.features.ids import Hashed, IdFeature, Integer
from meshrec.data.features.join import Join
from meshrec.data.features.keys import Key
from meshrec.data.features.label import Label
from meshrec.data.features.number import Number
from meshrec.data.features.timed import TimedFeatures
from meshrec.data.features.times import Times
from meshrec.data.features.values import hashes_of
from meshrec.data.features.vocabulary import Vocabulary

__all__ = [
    "Buckets",
    "ColumnFeature",
    "Cross",
    "DatePart",
    "Features",
    "FitState",
    "Hashed",
    "IdFeature",
    "Integer",
    "Join",
    "Key",
    "Label",
    "Number",
    "TimedFeatures",
    "Times",
    "UnfittedError",
    "Vocabulary",
    "hashes_of",
]
