"""Files: written whole, locked, held against what was expected before anything is made of them."""
