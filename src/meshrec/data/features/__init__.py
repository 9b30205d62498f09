"""Feature definitions as data: fitted once, and applied identically in training, scoring and serving.

A `Features` object lists labels and features. `Features.fit` learns vocabularies, quantiles and means from
training data in a single pass; `Features.save` writes the result as one JSON file. Hashes are public: a
value's row is ``features["user"].row_of("user-7")``.
"""

from meshrec.data.features.column_feature import UnfittedError
from meshrec.data.features.coverage import Coverage
from meshrec.data.features.derived import Buckets, Cross, DatePart
from meshrec.data.features.features import ColumnFeature, Features, FitState
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
