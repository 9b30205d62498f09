"""Watch the values of a recipe's features for drift."""

import numpy as np
import pyarrow as pa

from meshrec.data.encoding import RowChecks, RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.features import Features, Number, Vocabulary
from meshrec.data.features.ids import IdFeature
from meshrec.data.features.times import Times
from meshrec.metrics.drift import FeatureDrift, IdValues, NumberValues

_MAX_EDGES = 20


def drift_of(features: Features) -> FeatureDrift:
    """Create the windows for the values of fitted features."""
    return FeatureDrift(
        # Timestamps of histories change all the time.
        [_id_values(feature) for feature in features.ids if not isinstance(feature, Times)],
        [_number_values(number) for number in features.numbers],
    )


def _id_values(feature: IdFeature) -> IdValues:
    """Return the IDs that stand for missing values and for values outside a vocabulary."""
    missing = feature.row_of(None) if feature.null_remedy is None else None
    unseen = (1, 1 + feature.num_unseen) if isinstance(feature, Vocabulary) else (0, 0)
    return IdValues(feature.name, missing, unseen)


def _number_values(number: Number) -> NumberValues:
    """Return the buckets of a dense value: fitted ones, if the feature has bins, a range or a deviation."""
    edges: tuple[float, ...] = ()
    if number.edges is not None and len(number.edges) > 2:
        inner = np.array(number.edges[1:-1])
        edges = tuple(inner[:: -(-len(inner) // _MAX_EDGES)].tolist())
    elif number.mean is not None:
        edges = tuple(np.linspace(-3, 3, _MAX_EDGES).tolist())
    elif number.low is not None and number.high is not None and number.low < number.high:
        edges = tuple(np.linspace(number.low, number.high, _MAX_EDGES + 2)[1:-1].tolist())
    missing = None
    if number.missing is not None:
        checks = RowChecks(RowOrigin(number.name, 0), np.ones(1, np.bool_), Faults("raise"))
        missing = float(number.encode(pa.nulls(1, pa.float64()), checks)[0])
    return NumberValues(number.name, edges, missing)
