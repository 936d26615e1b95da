"""The commands, one dataclass each: its fields are the flags, `run` does the work and prints. No equations here."""
