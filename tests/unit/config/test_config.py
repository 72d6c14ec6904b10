from __future__ import annotations

from pathlib import Path

import pytest

from parkd.config import MIB, SETTINGS, Deadlines, ModelConfig, ProxyConfig, default_of, load
from parkd.errors import ConfigError

EXPLAINED = ("auto", 0, False)
"""Defaults whose meaning the help explains in words."""


def toml(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "parkd.toml"
    path.write_text(text)
    return {"config": str(path)}


def refusal(flags: dict[str, str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ or {})
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_serve_on_loopback_without_a_key_and_park_in_a_share_of_free_memory() -> None:
    config = load({}, {})
    assert (config.server.host, config.server.port, config.server.api_keys) == ("127.0.0.1", 8080, ())
    assert config.cache.budget_bytes == "auto"
    assert config.cache.slots is None
    assert config.model.model is None
    assert config.model.layout.context_tokens is None
    assert config.model.layout.batch_tokens is None
    assert load({"batch-size": "auto"}, {"PARKD_BATCH_SIZE": "64"}).model.layout.batch_tokens is None


def test_a_context_of_zero_is_the_largest_as_in_llama_server() -> None:
    assert load({"ctx-size": "0"}, {"PARKD_CTX_SIZE": "64"}).model.layout.context_tokens is None


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "ctx-size = 1000\n")
    environ = {"PARKD_CTX_SIZE": "2000"}
    assert load({}, {}).model.layout.context_tokens is None
    assert load(file, {}).model.layout.context_tokens == 1000
    assert load(file, environ).model.layout.context_tokens == 2000
    assert load(file | {"ctx-size": "3000"}, environ).model.layout.context_tokens == 3000


def test_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 9\n")
    assert load({}, {"PARKD_CONFIG": file["config"]}).server.port == 9


def test_toml_lists_numbers_and_booleans_mean_what_the_flag_means(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        'devices = ["cuda:0", "cuda:1", "cuda:2"]\nlayer_split = [24, 36]\nconversation-cache-mib = 4096\n'
        'host = "0.0.0.0"\ninsecure = true\n',
    )
    config = load(file, {})
    flags = {"devices": "cuda:0,cuda:1,cuda:2", "layer-split": "24,36", "conversation-cache-mib": "4096"}
    assert config == load(flags | {"host": "0.0.0.0", "insecure": "true"}, {})
    assert config.model.layout.layer_split == (24, 36)
    assert config.cache.budget_bytes == 4096 * MIB


def test_found_by_use_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    assert load(toml(tmp_path, "\ufeffport = 9\n"), {}).server.port == 9


def test_unknown_toml_key_names_the_nearest(tmp_path: Path) -> None:
    message = refusal(toml(tmp_path, "conversation-cache-mb = 1\n"))
    assert "conversation-cache-mb" in message
    assert "did you mean conversation-cache-mib?" in message


@pytest.mark.parametrize(
    "text",
    [
        "[server]\nport = 1\n",
        "port = 1.5\n",
        "devices = []\n",
        "port = = 1\n",
        pytest.param("port = " + "9" * 5000, id="a number too long"),
        pytest.param("devices = " + "[" * 5000, id="too deep"),
        "ledger = false\n",
        'api-key = ["a", true]\n',
        "port = 1\nport = 2\n",
    ],
)
def test_toml_that_cannot_be_meant_is_refused_with_the_file_named(tmp_path: Path, text: str) -> None:
    assert "parkd.toml" in refusal(toml(tmp_path, text))


MISTAKES = (
    "",
    " ",
    "a\nb",
    "\x00",
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 26,
    ",",
    "\N{SUPERSCRIPT TWO}",
    "[]",
    "true,false",
)
IN_A_FILE = ("{}", "[]", "{ a = 1 }", "[[1]]", "2026-01-01", "1.5", "-3", "true", '""', "'''a\nb'''")
CONTROLLED = ("a\nb", "\x00")


def said(flags: dict[str, str], environ: dict[str, str] | None = None) -> str | None:
    """How the settings are refused; None if they are not."""
    try:
        load(flags, environ or {})
    except ConfigError as error:
        return error.message
    return None


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS])
def test_found_by_use_every_mistake_in_every_setting_names_where_it_is(name: str, tmp_path: Path) -> None:
    """Whatever is typed gives a configuration or one printable line that names the flag, the variable or the key."""
    variable = next(each for each in SETTINGS if each.name == name).variable
    named = (f"--{name}", variable, f"{name} in ", f": {name} must", "slot-save-path", "llama-server needs --upstream")
    for text in MISTAKES:
        for message in (said({name: text}), said({}, {variable: text})):
            assert message is not None or text not in CONTROLLED
            assert message is None or (message.isprintable() and any(where in message for where in named))
    for text in IN_A_FILE:
        message = said(toml(tmp_path, f"{name} = {text}\n"))
        assert message is not None or text in ("1.5", "-3", "true", '""')
        assert message is None or (message.isprintable() and any(where in message for where in named))


def test_found_by_use_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    message = refusal(toml(tmp_path, "ctx-size = 1024\nctx_size = 2048\n"))
    assert "parkd.toml: ctx-size is there twice" in message


def test_numbers_in_a_file_may_have_a_point(tmp_path: Path) -> None:
    server = load(toml(tmp_path, "watts = 350\nkwh-price = 0.31\n"), {}).server
    assert (server.watts, server.kwh_price) == (350.0, 0.31)


def test_missing_file_is_refused() -> None:
    assert "/nowhere/parkd.toml" in refusal({"config": "/nowhere/parkd.toml"})


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("port", "70000", "from 0 to 65535"),
        ("port", "-1", "from 0 to 65535"),
        ("ctx-size", "8k", "whole number"),
        ("ctx-size", "15", "from 16 up, or 0 for the largest"),
        ("batch-size", "0", "from 1"),
        ("conversation-cache-mib", "lots", "auto"),
        ("conversation-cache-slots", "0", "from 1"),
        ("devices", "gpu0", "cuda:0,cuda:1"),
        ("devices", "cpu,", "cuda:0,cuda:1"),
        ("layer-split", "36,24", "ascending"),
        ("layer-split", "0", "ascending"),
        ("chat-template-file", "/nowhere.jinja", "no such file"),
        ("model", " ", "some text"),
        ("insecure", "maybe", "true or false"),
        ("kv-cache-dtype", "q4_0", "auto, bf16, f16, f32, int8, q8_0"),
        ("weights", "q4_0", "auto, int4, int8, fp8"),
        ("draft-tokens", "17", "from 0 to 16"),
        ("control-vector", "/nowhere.gguf", "no file '/nowhere.gguf'"),
        ("control-vector-scaled", "/nowhere.gguf", "FILE:SCALE"),
        ("control-vector-scaled", "/nowhere.gguf:much", "FILE:SCALE"),
        ("control-vector-layer-range", "20 10", "first and the last layer"),
        ("control-vector-layer-range", "0 10", "from 1 up"),
        ("control-vector-layer-range", "10", "first and the last layer"),
        ("upstream", "127.0.0.1:8081", "such as http://127.0.0.1:8081"),
        ("slot-save-path", "/nowhere", "no such directory"),
        ("read-share", "1", "from 0.1 to 0.9"),
        ("read-share", "half", "from 0.1 to 0.9"),
    ],
)
def test_bad_value_names_its_place_and_what_is_expected(name: str, text: str, hint: str) -> None:
    variable = "PARKD_" + name.upper().replace("-", "_")
    for message in (refusal({name: text}), refusal({}, {variable: text})):
        assert repr(text) in message
        assert hint in message
    assert f"--{name}" in refusal({name: text})
    assert variable in refusal({}, {variable: text})


@pytest.mark.parametrize("text", ["http://h:8081", "http://h:8081/", "http://h:8081/v1", "http://h:8081/v1/"])
def test_a_servers_address_may_be_that_of_its_clients(tmp_path: Path, text: str) -> None:
    flags = {"upstream": text, "slot-save-path": str(tmp_path), "conversation-cache-disk-mib": "8"}
    upstream = load(flags, {}).model.upstream
    assert upstream is not None
    assert upstream.url == "http://h:8081"


@pytest.mark.parametrize(
    ("flags", "kept_as"),
    [
        ({}, None),
        ({"kv-cache-dtype": "auto"}, None),
        ({"kv-cache-dtype": "INT8"}, "int8"),
        ({"cache-type-k": "q8_0", "cache-type-v": "q8_0"}, "int8"),
        ({"cache-type-k": "f16", "cache-type-v": "f16", "kv-cache-dtype": "f16"}, "f16"),
    ],
)
def test_keys_and_values_are_kept_as_one_type(flags: dict[str, str], kept_as: str | None) -> None:
    assert load(flags, {}).model.layout.kv_format == kept_as


@pytest.mark.parametrize(("text", "kind"), [("auto", None), ("INT4", "int4"), ("fp8", "fp8")])
def test_weights_are_converted_to_a_kind_by_name(text: str, kind: str | None) -> None:
    assert load({"weights": text}, {}).model.layout.weights == kind


@pytest.mark.parametrize(
    ("flags", "guesses"),
    [
        ({}, None),
        ({"draft-tokens": "auto"}, None),
        ({"draft-tokens": "0"}, 0),
        ({"draft-max": "4"}, 4),
        ({"draft-tokens": "3", "draft-max": "3"}, 3),
    ],
)
def test_guesses_a_step_go_by_either_name(flags: dict[str, str], guesses: int | None) -> None:
    assert load(flags, {}).model.layout.draft_tokens == guesses


def test_two_numbers_of_guesses_are_refused() -> None:
    assert "--draft-max is 4" in refusal({"draft-tokens": "3", "draft-max": "4"})


@pytest.mark.parametrize(
    "flags",
    [
        {"cache-type-k": "q8_0"},
        {"cache-type-k": "q8_0", "cache-type-v": "f16"},
        {"kv-cache-dtype": "f16", "cache-type-k": "q8_0", "cache-type-v": "q8_0"},
    ],
)
def test_two_types_are_refused(flags: dict[str, str]) -> None:
    assert "--cache-type-k" in refusal(flags)


def test_control_vectors_have_names_files_and_scales(tmp_path: Path) -> None:
    calm, terse = tmp_path / "calm.v2.gguf", tmp_path / "terse.safetensors"
    calm.touch()
    terse.touch()
    flags = {"control-vector": str(calm), "control-vector-scaled": f"short={terse}:-0.5,{terse}:0"}
    vectors = load(flags | {"control-vector-layer-range": "4 9"}, {}).model.control_vectors
    named = [(vector.name, vector.path, vector.scale) for vector in vectors]
    assert named == [("calm.v2", calm, 1.0), ("short", terse, -0.5), ("terse", terse, 0.0)]
    assert load({"control-vector-layer-range": "4 9"}, {}).model.steered_layers == (4, 9)
    assert (load({}, {}).model.control_vectors, load({}, {}).model.steered_layers) == ((), None)
    assert "two control vectors are called short" in refusal({"control-vector": f"short={calm},short={terse}"})


def test_bad_key_is_not_repeated_in_the_message() -> None:
    for name in ("api-key", "operator-key", "upstream-api-key"):
        message = refusal({name: "secret,\x01"})
        assert "secret" not in message
        assert f"--{name}" in message


@pytest.mark.parametrize(
    ("devices", "split", "allowed"),
    [("cpu,cpu", "15", True), ("cpu,cpu,cpu", "10,20", True), ("cpu", "15", False), ("cpu,cpu", "10,20", False)],
)
def test_split_names_one_layer_for_each_later_stage(devices: str, split: str, allowed: bool) -> None:
    flags = {"devices": devices, "layer-split": split}
    if allowed:
        load(flags, {})
    else:
        assert "--devices must name" in refusal(flags)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "my-host"])
def test_address_that_others_reach_needs_a_key_or_consent(host: str) -> None:
    assert "PARKD_API_KEY" in refusal({"host": host})
    assert load({"host": host, "api-key": "k"}, {}).server.api_keys == ("k",)
    assert load({"host": host}, {"PARKD_INSECURE": "1"}).server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_key(host: str) -> None:
    assert load({"host": host}, {}).server.host == host


def test_unknown_variable_is_told_but_stops_nothing() -> None:
    (note,) = load({}, {"PARKD_CTX_SIZ": "1", "PATH": "/bin"}).notes
    assert "PARKD_CTX_SIZ" in note
    assert "did you mean PARKD_CTX_SIZE?" in note


def test_cache_folder_follows_the_desktop_convention() -> None:
    assert load({}, {"XDG_CACHE_HOME": "/c"}).home == Path("/c/parkd")


def test_every_setting_has_a_name_and_a_help_of_its_own() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.help for setting in SETTINGS)


def test_the_help_shows_the_default_that_the_setting_has() -> None:
    told = {setting.name: setting.help for setting in SETTINGS if "{}" in setting.text}
    assert told["ctx-checkpoints"].endswith("for models that have it (8)")
    for setting in SETTINGS:
        if setting.metavar and isinstance(setting.default, int | str) and setting.default not in EXPLAINED:
            assert setting.name in told, f"{setting.name} writes its default twice"
            assert setting.help.endswith(f"({setting.default})")


def test_a_component_built_in_code_has_the_defaults_of_the_settings() -> None:
    config = load({}, {})
    assert config.server == ProxyConfig()
    assert Deadlines().silence_s == default_of("upstream-timeout")
    assert config.model == ModelConfig(None, config.home)


def test_answers_that_come_back_are_remembered_within_a_bound_or_rendered() -> None:
    assert load({}, {}).cache.answer_bytes == 32 * MIB
    assert load({"answer-memory-mib": "2"}, {}).cache.answer_bytes == 2 * MIB
    assert load({"replay": "strict", "answer-memory-mib": "2"}, {}).cache.answer_bytes == 0
    assert "remember or strict" in refusal({"replay": "exact"})


def test_web_pages_that_may_call_are_named_one_by_one() -> None:
    origins = load({"cors-origin": "https://a.example/,http://b.example:3000"}, {}).server.cors_origins
    assert origins == ("https://a.example", "http://b.example:3000")
    apps = "chrome-extension://abc,app://obsidian.md"
    assert load({"cors-origin": apps}, {}).server.cors_origins == tuple(apps.split(","))
    assert load({}, {}).server.cors_origins == ()
    for wrong in ("*", "a.example", "https://a.example/page"):
        assert "an origin such as" in refusal({"cors-origin": wrong})


def test_the_ledger_is_in_the_park_directory_or_where_programs_keep_their_state() -> None:
    state = {"XDG_STATE_HOME": "/s"}
    assert load({}, state).cache.ledger == Path("/s/parkd/8080-ledger.sqlite3")
    assert load({"port": "9"}, {}).cache.ledger == Path("~/.local/state/parkd/9-ledger.sqlite3").expanduser()
    parked = {"park-dir": "/d", "conversation-cache-disk-mib": "1"}
    assert load(parked, state).cache.ledger == Path("/d/ledger.sqlite3")
    assert load({**parked, "ledger": "/l"}, state).cache.ledger == Path("/l")
    assert load({"ledger": "off"}, state).cache.ledger is None


def test_a_price_needs_what_the_machine_takes() -> None:
    server = load({"watts": "350", "kwh-price": "0.31"}, {}).server
    assert (server.watts, server.kwh_price) == (350.0, 0.31)
    with pytest.raises(ConfigError, match="--watts"):
        load({"kwh-price": "0.31"}, {})
    for wrong in ("-1", "x", "1e3", "", "nan"):
        with pytest.raises(ConfigError):
            load({"watts": wrong}, {})


@pytest.mark.parametrize(
    "flags", [{"model": "m.gguf"}, {"ctx-size": "4096"}, {"flash-attn": str(default_of("flash-attn"))}], ids=str
)
def test_flags_of_the_model_beside_an_upstream_are_named_even_at_their_defaults(
    tmp_path: Path, flags: dict[str, str]
) -> None:
    upstream = {"upstream": "http://h:1", "slot-save-path": str(tmp_path), "conversation-cache-disk-mib": "8"}
    with pytest.raises(ConfigError, match=f"--{next(iter(flags))} is for a model that parkd loads itself"):
        load(upstream | flags, {})
