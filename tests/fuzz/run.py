"""Coverage-guided fuzzing of all readers: `pip install atheris`, then `python -m tests.fuzz.run CORPUS [FLAGS]`.

The first byte chooses the reader, the second how its file is spoiled: bytes as they are, bytes put over the good ones,
or values put in place of others. Stops at the first exception that is not `LayerwaveError`.
"""

import resource
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["layerwave"]):
    from tests.fuzz.readers import all_readers, spoiled

MOST_BYTES = 6 * 2**30


def content(reader, mode: int, data: bytes) -> bytes:
    if mode % 4 == 0:
        return data
    if mode % 4 == 1 and data:
        start = data[0] * len(reader.content) // 256
        return reader.content[:start] + data[1:] + reader.content[start + len(data) - 1 :]
    return spoiled(reader, [(data[i] * 256 + data[i + 1], data[i + 2]) for i in range(0, len(data) - 2, 3)][:4])


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
            if len(data) >= 2:
                number = data[0] % len(readers)
                readers[number].attempt(content(readers[number], data[1], data[2:]), places[number])

        atheris.Setup(sys.argv, one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
