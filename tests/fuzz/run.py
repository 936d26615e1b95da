"""Coverage-guided fuzzing of all readers: `pip install atheris`, then `python -m tests.fuzz.run CORPUS [FLAGS]`.

Stops at the first exception that is not `LayerwaveError`. What it finds new goes into CORPUS; corpus.txt keeps, one a
line, the inputs that showed a fault, and of the others as few as reach all branches that were ever reached.
"""

import resource
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["layerwave"]):
    from tests.fuzz.readers import all_readers, decoded

MOST_BYTES = 6 * 2**30


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        (folder / "made").mkdir()
        readers = all_readers(folder / "made")
        places = []
        for number, reader in enumerate(readers):
            places.append(folder / str(number))
            places[-1].mkdir()
            assert reader.attempt(reader.content, places[-1]) is None, reader.name
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

        def one(data: bytes) -> None:
            number, content = decoded(readers, data)
            readers[number].attempt(content, places[number])

        atheris.Setup(sys.argv, one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
