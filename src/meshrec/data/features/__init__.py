"""Features as data: what becomes of columns, fitted once and applied alike in training, scoring and serving.

A `Features` object names labels and features. `Features.fit` learns vocabularies, quantiles and means from
training data in one pass; `Features.save` writes all that as one JSON file. Hashes are public: the row of a
value is ``features["user"].row_of("user-7")``.
"""

from meshrec.data.features.column_feature import UnfittedError
from meshrec.data.features.derived import Buckets, Cross, DatePart
from meshrec.data.features.features import ColumnFeature, Coverage, Features, FitState
from meshrec.data.features.ids import Hashed, IdFeature, Integer
from meshrec.data.features.join import Join
from meshrec.data.features.keys import Key
from meshrec.data.features.label import Label
from meshrec.data.features.number import Number
from meshrec.data.features.times import Times
from meshrec.data.features.values import hashes_of
from meshrec.data.features.vocabulary import Vocabulary

__all__ = [
    "Buckets",
    "ColumnFeature",
    "Coverage",
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
    "Times",
    "UnfittedError",
    "Vocabulary",
    "hashes_of",
]
