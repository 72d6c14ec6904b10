"""The files of the disk tier: what the store asks of them (`fs`), and the park directory (`park_directory`)."""
