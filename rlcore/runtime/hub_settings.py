"""Fetches the small files of a model on the Hub that a plan reads: its architecture and its chat template.

Defaults of a GPU depend on them: whether an engine fits next to the training state, and the size of a micro-batch.
"""

import logging
import re
import urllib.error
import urllib.request
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.contracts.model_files import model_directory
from rlcore.errors import ConfigError, boundary

logger = logging.getLogger(__name__)

FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
WAIT_S = 5.0
"""Seconds for the Hub to answer one request."""


def model_files(model: ModelConfig) -> Path:
    """The directory of `model_directory`, after these files of a model on the Hub have been fetched into the cache.

    Weights are not fetched. Without an answer of the Hub the directory does not exist, and facts about the model are
    unknown.
    """
    found = model_directory(model.path, model.revision)
    if not found.is_dir() and HUB_NAME.fullmatch(model.path):
        _fetch(model)
        found = model_directory(model.path, model.revision)
    return found


def _fetch(model: ModelConfig) -> None:
    try:
        with boundary(f"model.path='{model.path}': fetching its settings from the Hub", ConfigError):
            _download(model)
    except ConfigError as error:  # a plan works without the Hub, and loading the model reports what is wrong
        logger.debug("%s", error)


def _download(model: ModelConfig) -> None:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT):
        return
    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        for name in FILES:
            with suppress(EntryNotFoundError):
                hf_hub_download(model.path, name, revision=model.revision, etag_timeout=WAIT_S)
    finally:
        if not silent:
            enable_progress_bars()


@cache
def _answers(endpoint: str) -> bool:
    """True if the Hub answers this process; its client would try again for half a minute."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=WAIT_S):
            return True
    except urllib.error.HTTPError as error:
        return error.code < HTTPStatus.INTERNAL_SERVER_ERROR
    except OSError:
        return False
