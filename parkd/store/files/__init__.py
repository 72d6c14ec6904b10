"""The files of the disk tier: what the store asks of them (`fs`), the park directory (`park_directory`), and the jobs,
layouts and manifests that are written there."""
