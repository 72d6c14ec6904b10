"""The threads on which engine calls run, and how the work of several turns takes turns there."""
