"""parkd's store on disk, inside other engines.

identity.py   what must be equal before state may be used again: weights, configuration, engine, rows, topology
weights.py    the digest of a model's weight files
canary.py     trials that prove a server before it may restore
server.py     an OpenAI-style server, as the canary asks it
files.py      small files in the directory
tier.py       the store of chunks (`parkd.store.chunks`) with the threads that read and write
opening.py    a tier over a directory, and what is said of state there that cannot be used
vllm/         behind vLLM's SecondaryTierManager
sglang.py     behind SGLang's HiCacheStorage
lmcache.py    behind LMCache's L2AdapterInterface
cli.py        parkd-tier config, canary, look
"""

__version__ = "0.1.0"
