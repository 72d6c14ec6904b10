"""Commands and flags that users of Ollama, llama-server and vLLM know, and what does the same here."""

from __future__ import annotations

from collections.abc import Mapping

_NAME_THE_MODEL = "one model is served, named with --model (a hub id is downloaded): parkd --model owner/name"
FOREIGN_COMMANDS: Mapping[str, str] = {
    "run": _NAME_THE_MODEL,
    "pull": _NAME_THE_MODEL,
    "list": "GET /v1/models of a running server tells its model",
    "stop": "end the server with Ctrl-C or SIGTERM",
    **dict.fromkeys(("create", "cp", "rm", "push"), "models are files that --model names; none are kept here"),
    **dict.fromkeys(("help", "version"), "ask with --help or --version"),
}
"""Commands of Ollama, and what to use instead."""

_ONE_LANE = "one conversation runs at a time, and the others are parked: see --conversation-cache-mib"
_PARKING = "memory for parked conversations is --conversation-cache-mib"
_NOT_NEEDED = "it is always on; leave it out"
_NOTHING = "there is no such setting; leave it out"
_EXACT = "state is reused exactly where the prompt is equal; leave it out"
_REQUEST = "each request says how its answer is sampled"
_NO_SHIFT = "a conversation is never cut to fit; leave it out, and set the context with --ctx-size"
_TEXT_ONLY = "this server generates text only"
_HUB = "the quantisation is named with the model: --model owner/name:Q4_K_M"
_OWN_HEAD = "only a model's own draft head guesses: --draft-tokens"
_LAYERS = "layers are placed by --devices, or with llama.cpp by --gpu-layers, --tensor-split and --cpu-moe"
_TEMPLATE = "a template is a file: --chat-template-file"
_PROXY = "put a proxy with TLS in front"
_THINKING = "each request limits its thinking with `thinking_budget` or `reasoning_effort`"
_FORMATS = "formats of tool calls and thinking are found from the chat template; leave it out"
_LOG = "the log goes to standard error; redirect it"
_ROTARY = "rotary settings are the model's own; leave it out"

_LLAMA_SERVER = (
    ("it is --gpu-layers", "--n-gpu-layers"),
    (
        _ONE_LANE,
        "-cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified --no-kv-unified -sps --slot-prompt-similarity",
    ),
    (_PARKING, "--cache-ram -cram --cache-idle-slots --no-cache-idle-slots"),
    (_HUB, "-hff --hf-file -mu --model-url -dr --docker-repo"),
    ("set HF_TOKEN", "-hft --hf-token"),
    ("set HF_HUB_OFFLINE=1", "--offline"),
    (
        _NOT_NEEDED,
        "--jinja --metrics --slots --props --cache-prompt --reasoning-format --kv-offload "
        "--prefill-assistant --no-prefill-assistant",
    ),
    (
        _NOTHING,
        "--no-slots --no-metrics --ui --webui --no-jinja --no-cache-prompt --no-warmup "
        "--warmup --check-tensors --mlock --no-mmap --mmap --swa-full --direct-io -nr --no-repack -v "
        "--verbose -lv --verbosity -to --timeout --numa --prio --poll -tb --threads-batch -td "
        "--threads-http -C --cpu-mask --path --api-prefix --warn --color -co --props-file "
        "--sleep-idle-seconds --spm-infill --tags",
    ),
    (_LOG, "--log-file --log-disable --log-colors --log-prefix --log-timestamps"),
    ("the longest answer is --max-output-tokens", "-n --n-predict --predict"),
    ("tokens read in one chunk are --batch-size", "-ub --ubatch-size"),
    (
        _REQUEST,
        "--temp --temperature --top-k --top-p --min-p --typical --samplers -s --seed --repeat-penalty "
        "--repeat-last-n --presence-penalty --frequency-penalty --mirostat --xtc-probability "
        "--dry-multiplier --ignore-eos -l --logit-bias --grammar --grammar-file -j --json-schema",
    ),
    (
        _OWN_HEAD,
        "-md --model-draft -hfd --hf-repo-draft --spec-type --draft --draft-n --draft-min --draft-p-min "
        "-ngld --gpu-layers-draft -cd --ctx-size-draft",
    ),
    (_EXACT, "--cache-reuse --keep --lookup-cache-static -lcs"),
    (_NO_SHIFT, "--context-shift --no-context-shift"),
    (_TEXT_ONLY, "-mv --model-vocoder"),
    (
        "images are read by the torch engine, from a model directory that has its image processor",
        "-mm --mmproj -mmu --mmproj-url --no-mmproj --mmproj-offload",
    ),
    (
        _LAYERS,
        "-ot --override-tensor -dev --device --list-devices -fit --fit --rpc",
    ),
    (
        _ROTARY,
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --override-kv "
        "--yarn-ext-factor --yarn-attn-factor",
    ),
    (_PROXY, "--ssl-key-file --ssl-cert-file"),
    (_TEMPLATE, "--chat-template"),
    ("each request gives them in `chat_template_kwargs`", "--chat-template-kwargs"),
    (_THINKING, "--reasoning -rea --reasoning-budget --reasoning-budget-message"),
    (_NAME_THE_MODEL, "--models-dir --models-max --models-preset"),
    ("an adapter that requests choose is --lora-scaled FILE:0", "--lora-init-without-apply"),
    ("images are sent in requests, as data URLs", "--media-path"),
    ("tools are sent in requests; this server runs none", "--tools"),
)
"""What to use instead of flags of llama-server that parkd has not, and those flags."""

_VLLM = (
    ("it is --ctx-size", "--max-model-len"),
    ("it is --alias", "--served-model-name"),
    (
        "the devices of the layer split are --devices cuda:0,cuda:1",
        "--tensor-parallel-size -tp --pipeline-parallel-size -pp",
    ),
    ("conversations that stay live are --parallel", "--max-num-seqs"),
    (_ONE_LANE, "--data-parallel-size -dp --max-num-batched-tokens"),
    ("arenas take what --ctx-size needs; give a smaller one to leave memory free", "--gpu-memory-utilization"),
    (_PARKING, "--swap-space --cpu-offload-gb --kv-offloading-size --kv-transfer-config"),
    (_NOT_NEEDED, "--enable-prefix-caching --enable-chunked-prefill --no-enable-prefix-caching"),
    (_FORMATS, "--enable-auto-tool-choice --tool-call-parser --reasoning-parser"),
    ("weights are computed as their files have them; leave it out", "--quantization -q --dtype --load-format"),
    (_NOTHING, "--enforce-eager --compilation-config --block-size --attention-backend"),
    ("code from model folders is never run; leave it out", "--trust-remote-code"),
    ("adapters are --lora FILE, with llama.cpp; requests choose by `lora`", "--enable-lora --lora-modules"),
    (_OWN_HEAD, "--speculative-config"),
    ("name a model directory that has it", "--revision --hf-overrides --download-dir"),
    (_LOG, "--uvicorn-log-level --disable-log-requests --disable-log-stats"),
)
"""The same for vLLM."""

FOREIGN_FLAGS: Mapping[str, str] = {
    flag: advice for advice, flags in (*_VLLM, *_LLAMA_SERVER) for flag in flags.split()
}
