"""What a profile may do only with its user's consent: run code that it names, and send data away.

All else in a profile is data. The consent is ``--yes``, an answer on the terminal, or the names in
the environment variable ``SAGE_TRUST``, parted by commas. Processes that are started inherit it.
"""

import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from sage_lib.errors import SageError
from sage_lib.text import visible

VARIABLE = "SAGE_TRUST"
#: How a profile names code, as in "package.module:function".
CODE = r"\w+(\.\w+)*:\w+(\.\w+)*"
#: Keys under which a profile names a judge or a guide.
_NAMING = ("judge", "guide", "inner", "name")
_RUNS, _SENDS = "runs code from elsewhere", "sends data to a server"
#: Settings of TRL, PEFT, transformers and vLLM: pattern of their keys -> what they do.
_SETTINGS = {
    r"trust_remote_code|custom_generate|model_init_kwargs|megatron_core": _RUNS,
    r"push_to_hub\w*|hub_\w+|\w+_hub_repo|trackio_\w+|report_to|deepspeed": _SENDS,
    r"vllm_server_(base_url|host)": _SENDS,
}
#: Values with which none of these settings runs or sends anything.
_HARMLESS: tuple[Any, ...] = (
    *(None, False, "", [], {}),
    *("none", ["none"], "tensorboard", ["tensorboard"]),
)
#: Keywords of vllm.LLM that only lay work on the machine. Others can name classes to import.
_VLLM = (
    *("block_size", "cpu_offload_gb", "disable_custom_all_reduce", "disable_log_stats", "dtype"),
    *("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "kv_cache_dtype"),
    *("gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("max_seq_len_to_capture", "pipeline_parallel_size", "quantization", "seed", "swap_space"),
    "tensor_parallel_size",
)
_agreed = False  # to everything, by --yes


def agree(yes: bool) -> None:
    """Agree, in this process, to all that is asked, if ``yes``: the meaning of ``--yes``."""
    global _agreed
    _agreed = yes


def requests(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a name and what it does for each part of a profile that needs consent.

    "mine:judge" runs code, "rl.push_to_hub" sends data. ``prefix`` begins the dotted keys.
    """
    for key, value in settings.items():
        full_key = f"{prefix}{key}"
        if key in _NAMING and isinstance(value, str) and re.fullmatch(CODE, value):
            yield value, "is code that it runs"
        for pattern, does in _SETTINGS.items():
            last = str(key).rpartition(".")[2]  # below ``vary`` keys are dotted
            if re.fullmatch(pattern, last) and value not in _HARMLESS:
                yield full_key, does
        if key == "vllm" and isinstance(value, Mapping):
            for name in value.keys() - {*_VLLM, "trust_remote_code"}:
                yield f"{full_key}.{name}", "may name code for vLLM to import"
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                yield from requests(inner, f"{full_key}.")


def require(name: str, does: str) -> None:
    """Ask the user for consent to one name of :func:`requests`; SageError without consent.

    This process, and those that it starts, ask for each name once."""
    name = visible(name).replace(",", ";")  # a comma would be consent to two names
    trusted = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    if name in trusted:
        return
    words = f"the profile, or the command, asks for {name}, which {does}"
    if _agreed:
        print(f"{words}: agreed by --yes", file=sys.stderr, flush=True)
    elif not sys.stdin or not sys.stdin.isatty():
        raise SageError(
            f"{words}. Look at what that is. If you trust it, give --yes, or set "
            f"{VARIABLE}={','.join([*trusted, name])}"
        )
    elif not answered(f"{words}.\nDo you trust it? [y/N] "):
        raise SageError(f"{name} is not trusted: nothing was started")
    os.environ[VARIABLE] = ",".join([*trusted, name])


def answered(question: str) -> bool:
    """Ask on the terminal; return whether the answer is yes. No answer is no."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def require_all(settings: Mapping[str, Any]) -> None:
    """Ask for all that merged settings of a profile need consent for, as :func:`require` does."""
    for name, does in dict(requests(settings)).items():
        require(name, does)


def imported(name: str, kind: str) -> Any:
    """Import what a profile names as "module:attribute", after its user has consented.

    SageError without consent, and where no ``kind``, such as a judge, has this name."""
    require(name, "is code that it runs")
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:
        raise SageError(
            f"the {kind} {name} cannot be imported ({error!r}): correct its name, or add its "
            "folder to PYTHONPATH"
        ) from error
