"""The questions in the size that `layerwave bench` asks them."""

from collections.abc import Iterator

from layerwave.bench.answer import Answer
from layerwave.bench.entropy import entropy_of_triples
from layerwave.bench.growth import growth
from layerwave.bench.search import searches
from layerwave.bench.similarity import conditional_similarity, pairwise_similarity
from layerwave.errors import LayerwaveError
from layerwave.selection.sets import check_count


def quick_answers(layers: int, rows: int, features: int, repetitions: int) -> Iterator[Answer]:
    """Questions 1 to 5 for a target's shape, one after the other; growth from half of each size.

    Raises `LayerwaveError` for fewer than 8 layers, 8 rows, 1 feature or 1 repetition.
    """
    for name, count, least in (("layers", layers, 8), ("rows", rows, 8), ("features", features, 1)):
        if check_count(name, count) < least:
            raise LayerwaveError(f"{name} is {count}: the benchmark needs at least {least}")
    repetitions = check_count("repetitions", repetitions)
    shape = {"layers": layers, "rows": rows, "features": features, "repetitions": repetitions}
    yield entropy_of_triples(**shape, many_layers=2 * layers, literal_sets=20)
    yield pairwise_similarity(**shape)
    yield conditional_similarity(**shape, literal_pairs=20)
    yield searches(**shape, problems=100, alone=10)
    yield growth(
        num_layers=layers,
        num_rows=rows,
        features=features,
        layers=(layers // 2, layers, 2 * layers),
        sizes=(1, 2, 3, 4),
        rows=(rows // 2, rows, 2 * rows, 4 * rows),
        beams=(5, 10, 20),
        repetitions=repetitions,
    )
