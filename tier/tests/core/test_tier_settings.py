"""From a budget to vLLM's configuration and back, and what of vLLM is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parkd_tier.cli import main
from parkd_tier.vllm.requirements import check_config, check_version
from parkd_tier.vllm.segments import replace_segment, segment_name
from parkd_tier.vllm.settings import TierSettings

from parkd.errors import ConfigError
from parkd.store.files.park_directory import open_directory

MIB = 1 << 20


def test_config_prints_what_vllm_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "--dir", str(tmp_path), "--ram-mib", "640", "--disk-mib", "5000", "--chunk-tokens", "256"]
    assert main(words) == 0
    config = json.loads(capsys.readouterr().out)
    extra = config["kv_connector_extra_config"]
    [entry] = extra["secondary_tiers"]
    assert extra["cpu_bytes_to_use"] + entry["index_mib"] * MIB == 640 * MIB, "all of it is in the budget"
    assert extra["offload_prompt_only"] is False
    assert extra["block_size"] == 256
    assert config["kv_load_failure_policy"] == "recompute"
    settings = TierSettings.of({name: entry[name] for name in entry if name not in ("type", "module_path")})
    assert settings.directory == tmp_path
    assert settings.disk_bytes == 5000 * MIB
    assert settings.write_bytes_per_day == 200 << 30
    assert settings.options(100 * MIB).waiting_bytes == 50 * MIB


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"directory": "/x"},
        {"directory": "/x", "disk_mib": 0},
        {"directory": "/x", "disk_mib": True},
        {"directory": "/x", "disk_mib": 5.5},
        {"directory": "/x", "disk_mib": 5, "disk_gib": 1},
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="parkd-tier"):
        TierSettings.of(values)


def test_each_replica_has_a_directory() -> None:
    settings = TierSettings.of({"directory": "/x", "disk_mib": 5})
    alone, second = (SimpleNamespace(data_parallel_size=n, data_parallel_index=1) for n in (1, 2))
    assert settings.replica_directory(alone) == Path("/x")
    assert settings.replica_directory(second) == Path("/x/replica-1")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5+cpu"])
def test_a_tested_version_passes(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", ""])
def test_another_version_is_refused_with_a_sentence(version: str) -> None:
    with pytest.raises(ConfigError, match=r"tested with vLLM from 0\.32 up to 0\.33"):
        check_version(version)


def config(**cache: Any) -> SimpleNamespace:
    known = {"calculate_kv_scales": False, "enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256"}
    return SimpleNamespace(lora_config=None, cache_config=SimpleNamespace(**known | cache))


def test_usual_settings_pass() -> None:
    check_config(config())
    check_config(config(prefix_caching_hash_algo="sha256_cbor"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (config(calculate_kv_scales=True), "calculate-kv-scales"),
        (config(enable_prefix_caching=False), "prefix caching"),
        (config(prefix_caching_hash_algo="xxhash"), "xxhash"),
        (SimpleNamespace(lora_config=object(), cache_config=config().cache_config), "enable-lora"),
    ],
)
def test_settings_under_which_keys_do_not_say_all_are_refused(wrong: SimpleNamespace, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_config(wrong)


def test_the_segment_of_a_killed_process_is_removed_and_no_other(tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    for start in ("one", "two"):
        fs = open_directory(tmp_path / "park")
        assert replace_segment(fs, segment_name(start), memory) == (0 if start == "one" else 8192)
        fs.close()
        (memory / segment_name(start)).write_bytes(bytes(8192))
        (memory / segment_name("another's")).write_bytes(bytes(8192))
    assert {path.name for path in memory.iterdir()} == {segment_name("two"), segment_name("another's")}


@pytest.mark.parametrize("name", ["../park/lock", "vllm_offload_/../x.mmap", "important", ""])
def test_a_note_that_names_anything_else_removes_nothing(tmp_path: Path, name: str) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    (memory / "important").write_bytes(b"x")
    fs = open_directory(tmp_path / "park")
    (tmp_path / "park" / "segment").write_text(name)
    assert replace_segment(fs, segment_name("next"), memory) == 0
    fs.close()
    assert (memory / "important").exists()
    assert (tmp_path / "park" / "lock").exists()
