"""Behind vLLM's `OffloadingConnector`: state leaves the device through vLLM's tier in memory, and goes to disk here.

connector.py      what vLLM is told to load: checks, then vLLM's connector
requirements.py   what of vLLM is known to work with it
facts.py          who computes state, and what its bytes are
manager.py        vLLM's SecondaryTierManager over a tier
spec.py           vLLM's spec, also where the model runs on processors
counters.py       what is counted, under vLLM's metrics
gate.py           whether state may be restored yet
logs.py           shows what is logged
segments.py       segments of shared memory that dead processes left
settings.py       what the operator says
"""
