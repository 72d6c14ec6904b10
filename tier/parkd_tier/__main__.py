from parkd_tier.cli import entry

entry()
