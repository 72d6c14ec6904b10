"""One conversation in one file, which goes from one parkd to another.

header.py    what the file says of itself, byte by byte; docs/FORMAT.md describes it
parts.py     the bytes of blocks and checkpoints: written, and read again with their checksums compared
source.py    from a store or a park directory into a file
landing.py   from a file into the room that a store reserved, or into a park directory
fitting.py   whether what a file holds can be used here, and why not
"""
