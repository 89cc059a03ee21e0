"""Chat templates: rendered as transformers renders them, and within bounds whatever they do."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig
from rlcore.contracts import templates
from rlcore.contracts.templates import TemplateRefused, end_template_child, render, template_child
from rlcore.data.tokenizer import TemplateTokens, load_tokens
from rlcore.errors import ANSWERED, ConfigError
from rlcore.testing.leaks import is_running

HERE = Path(__file__).parent
TEMPLATES = sorted((HERE / "chat_templates").glob("*.jinja"))
"""Of published models; those that end in _training have generation blocks. TRL distributes them (Apache 2.0)."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role }}\n"
    "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwölf"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <b>two</b> numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 1 + 2?\n'quoted' & <b> \U0001f600"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "3"},
    ],
    [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": "d"},
    ],
]

ATTACKS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{% for i in range(9) %}{{ m() }}{% endfor %}{% endmacro %}{{ m() }}",
    "doubled by ~": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "multiplied": "{{ 'x' * 10 ** 10 }}",
    "a list multiplied": "{% set ns = namespace(s=[1] * 10 ** 10) %}{{ ns.s }}",
    "join": "{% set s = 'x' * 10 ** 6 %}{{ ([s] * 10 ** 5) | join }}",
    "replace": "{{ ('x' * 10 ** 5) | replace('x', 'y' * 10 ** 6) }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "indent": "{{ ('x\n' * 10 ** 5) | indent(10 ** 6) }}",
    "percent format": "{{ '%10000000000d' % 1 }}",
    "format method": "{{ '{:10000000000}'.format(1) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "a power": "{{ (10 ** (10 ** 9)) is odd }}",
    "batch": "{% for a in [1] | batch(10 ** 10, 1) %}{{ a | length }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10 ** 7) }}",
    "a long text": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "tojson with an indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "a slow sort": "{% for i in range(9999) %}{% set s = range(99999) | sort(reverse=i is odd) %}{% endfor %}",
}


FEW = ("nested loops", "a macro that calls itself", "doubled by ~", "center", "a long text")
"""One of each kind for the default suite; the others are cases of the fault suite."""


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    """Bounds that are reached fast."""
    end_template_child()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "CPU_S", 0.5)
        patch.setattr(templates, "MEMORY", 256 << 20)
        yield
    end_template_child()


def tokenizer_with(template: str) -> Any:
    """A tokenizer of bytes with this template, from the directory `models/m`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_end|>", "<|eot_id|>", "<bos>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<bos>")
    fast.chat_template, fast.name_or_path = template, "models/m"
    return fast


def expected(tokenizer: Any, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """The text that transformers renders in this process, or the name of the error that it raises."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except ANSWERED as error:
        return type(error).__name__


def found(tokenizer: Any, messages: list[dict[str, Any]], **arguments: Any) -> str:
    try:
        return render(tokenizer, messages, "it", **arguments)
    except TemplateRefused as error:
        return str(error).split(": ")[1]


@pytest.mark.slow
@pytest.mark.parametrize("template", [*TEMPLATES, CHATML], ids=lambda path: getattr(path, "stem", "chatml"))
@pytest.mark.parametrize("opening", [False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_texts_and_ids_are_those_of_transformers(template: Path | str, opening: bool, tools: Any) -> None:
    tokenizer = tokenizer_with(template if isinstance(template, str) else template.read_text("utf-8"))
    rendered = 0
    for messages in CONVERSATIONS:
        arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": opening, "enable_thinking": False}
        text = found(tokenizer, messages, **arguments)
        assert text == expected(tokenizer, messages, **arguments)
        if " " in text:
            rendered += 1
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **arguments)
            assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert rendered


@pytest.mark.slow
def test_the_shipped_models_ids_are_those_of_transformers() -> None:
    model = Path(".models/smollm2-135m-instruct")
    if not model.is_dir():
        pytest.skip("examples/arithmetic/get_model.py downloads it")
    tokens: Any = load_tokens(ModelConfig(path=str(model)), "")
    messages = CONVERSATIONS[3]
    wanted = tokens._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(tokens.encode_prompt(messages)) == wanted


def test_a_template_of_a_directory_with_several_is_chosen_by_tools() -> None:
    tokenizer = tokenizer_with("")
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    assert found(tokenizer, CONVERSATIONS[0]) == "plain"
    assert found(tokenizer, CONVERSATIONS[0], tools=[TOOL]) == "with tools"


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [name if name in FEW else pytest.param(name, marks=pytest.mark.fault) for name in ATTACKS]
)
def test_a_template_ends_within_its_bounds(attack: str) -> None:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokenizer = tokenizer_with(ATTACKS[attack])
    with pytest.raises(ConfigError, match=r"^the chat template of 'models/m' \(model") as caught:
        TemplateTokens(tokenizer).encode_prompt(CONVERSATIONS[0])
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert found(tokenizer_with("fine"), CONVERSATIONS[0]) == "fine"


def test_a_template_that_needs_more_memory_than_it_may_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^it: it used more than 256 MiB of memory; needs a template that only"):
        render(tokenizer_with("{% set text = 'x' * 400000000 %}{{ text | length }}"), CONVERSATIONS[0], "it")


def test_a_lone_surrogate_that_a_template_writes_is_replaced() -> None:
    assert render(tokenizer_with("a{{ '\\ud800' }}b"), CONVERSATIONS[0], "it").strip("\ufffd") not in ("", "ab")
    assert TemplateTokens(tokenizer_with("a{{ '\\ud800' }}b")).encode_prompt(CONVERSATIONS[0])


def test_a_text_that_no_window_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^it: it wrote 9000000 bytes of text; at most 8388608 are allowed"):
        render(tokenizer_with("{{ 'x' * 9000000 }}"), CONVERSATIONS[0], "it")


@pytest.mark.fault
def test_a_bound_holds_for_one_conversation_and_not_for_all() -> None:
    busy = tokenizer_with("{% for i in range(20000) %}{% for j in range(5) %}{% endfor %}{% endfor %}done")
    began = time.process_time()
    while template_child() is None or _cpu_s(template_child()) < 2.5:
        assert found(busy, CONVERSATIONS[0]) == "done"
        assert time.process_time() - began < 60


def _cpu_s(process: "subprocess.Popen[bytes] | None") -> float:
    assert process is not None
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.fault
def test_a_child_that_is_killed_or_says_nothing_is_an_error_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = tokenizer_with("fine")
    assert found(fine, CONVERSATIONS[0]) == "fine"
    first = template_child()
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"it: it ended its process \(exit code -9\)"):
        render(fine, CONVERSATIONS[0], "it")
    assert found(fine, CONVERSATIONS[0]) == "fine"
    second = template_child()
    assert second is not None
    monkeypatch.setattr(templates, "WALL_S", 0.5)
    os.kill(second.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match=r"it: it has not ended within 0\.5 s"):
        render(fine, CONVERSATIONS[0], "it")
    assert not is_running(second.pid)


@pytest.mark.slow
def test_threads_get_their_own_answers() -> None:
    tokenizer, wrong = tokenizer_with("{{ messages[0].content }}"), []

    def ask(name: str) -> None:
        for number in range(20):
            text = f"{name} {number} " * 1000
            if found(tokenizer, [{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_templates_see_no_secret_and_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert found(tokenizer_with("fine"), CONVERSATIONS[0]) == "fine"
    child = template_child()
    assert child is not None
    assert b"sk-secret" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    end_template_child()
    assert not is_running(child.pid)


PROGRAM = """
import asyncio, sys
sys.path.insert(0, {here!r})
from test_templates import ATTACKS, CONVERSATIONS, tokenizer_with
from rlcore.config import ModelConfig
from rlcore.contracts import templates
from rlcore.train.signals import StopRequest

async def main():
    with StopRequest(finish_step=False).installed():
        templates.CPU_S = 1.0
        templates.render(tokenizer_with("fine"), CONVERSATIONS[0], "it")
        print(templates.template_child().pid, flush=True)
        try:
            templates.render(tokenizer_with(ATTACKS["nested loops"]), CONVERSATIONS[0], "it")
        except templates.ConfigError as error:
            print(error)
        await asyncio.sleep(60)

try:
    asyncio.run(main())
except asyncio.CancelledError:
    sys.exit(143)
"""


@pytest.mark.fault
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_run_whose_template_hangs(signum: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(here=str(HERE)))
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signum)
        assert process.wait(30) == (143 if signum is signal.SIGTERM else -signal.SIGKILL)
    patience = time.monotonic() + 10
    while is_running(child) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not is_running(child)
