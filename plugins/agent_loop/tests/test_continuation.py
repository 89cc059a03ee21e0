"""Between two turns only new text is tokenised, as the template would have written it: case 25 of the scorecard."""

import random
from functools import cache
from pathlib import Path

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import ScriptedPolicy, call, talk

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import TemplateTokens, load_tokens
from rlcore.errors import ConfigError
from rlcore.types import Message

SMOLLM2 = Path(".models/smollm2-135m-instruct")
QWEN = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """
{%- if tools %}<|start|>system<|end|>

{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|eot|>{% endif %}
{%- for m in messages %}<|start|>{{ "ipython" if m.role == "tool" else m.role }}<|end|>

{{ (m.content | tojson) if m.role == "tool" else m.content }}<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""
# In the manner of templates that drop what was thought before the last question.
FORGETS = QWEN.replace(
    "{{ m.content }}<|im_end|>\n{% endif %}",
    "{{ m.content if loop.last or messages[-1].role != 'user' or m.role != 'assistant' else "
    "m.content.split('</think>')[-1] }}<|im_end|>\n{% endif %}",
)
REFUSES = QWEN.replace('{%- if m.role == "tool" %}', '{%- if m.role == "tool" %}{{ raise_exception("no tools") }}', 1)
THINKS = QWEN.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>")


@cache
def tokens_of(template: str, end: str, merges: bool = True) -> TemplateTokens:
    """Tokens with a byte-pair tokenizer that merges across what separates words, and a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("t", "o"), ("to", "o"), ("o", "l"), ("Ġ", "a"), ("e", "r"), ("Ċ", "<"), (">", "Ċ")]
    merged = [left + right for left, right in pairs]
    vocabulary = {letter: place for place, letter in enumerate([*alphabet, *merged])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs if merges else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    fast.chat_template = template
    return TemplateTokens(fast)


def smollm2() -> TemplateTokens:
    tokens = load_tokens(ModelConfig(path=str(SMOLLM2)), "")
    assert isinstance(tokens, TemplateTokens)
    return tokens


def texts(numbers: random.Random) -> str:
    """A text without white space around it, which templates may trim."""
    words = ["tool", "water", "\n\n", "<", ">\n<", "é", "四", "a b", "42", "\\n", '"', "{}", "</tool_call>", "er to"]
    return "x" + "".join(numbers.choice(words) for _ in range(numbers.randrange(8))) + "."


def check_round_trips(tokens: TemplateTokens, num: int, seed: int = 0) -> None:
    """`num` turns of random conversations equal, id for id, the template's own rendering of the whole conversation."""
    numbers = random.Random(seed)
    tokens.check_continuation(["tool", "user"])
    ended_turn = tokens.encode_prompt([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}])
    end = next(token for token in ended_turn[::-1] if token in tokens.eos_ids)
    done = 0
    while done < num:
        messages: list[Message] = [{"role": "user", "content": texts(numbers)}]
        ids = tokens.encode_prompt(messages)
        for _ in range(numbers.randrange(1, 6)):
            text = texts(numbers)
            ended = numbers.random() < 0.5
            sampled = tokens._encode_text(text)
            ids += sampled
            if ended:
                ids += (end,)
            role = numbers.choice(["tool", "user"])
            new: list[Message] = [
                {"role": role, "content": texts(numbers)}
                for _ in range(numbers.randrange(1, 4) if role == "tool" else 1)
            ]
            before = ids
            ids += tokens.continuation(new, ids[-1])
            messages += [{"role": "assistant", "content": text}, *new]
            assert ids[: len(before)] == before
            done += 1
        assert ids == tokens.encode_prompt(messages)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "end"), [(QWEN, "<|im_end|>"), (LLAMA, "<|eot|>")], ids=["qwen", "llama"])
def test_two_hundred_turns_equal_the_conversation_as_the_template_writes_it_whole(template: str, end: str) -> None:
    check_round_trips(tokens_of(template, end), 200)


@pytest.mark.fault
@pytest.mark.parametrize(("template", "end"), [(QWEN, "<|im_end|>"), (LLAMA, "<|eot|>")], ids=["qwen", "llama"])
def test_case_25_ten_thousand_turns_of_templates_with_tools_are_exact(template: str, end: str) -> None:
    check_round_trips(tokens_of(template, end), 10_000, seed=1)


@pytest.mark.real
def test_case_25_ten_thousand_turns_of_smollm2s_own_template_are_exact() -> None:
    check_round_trips(smollm2(), 10_000)


def check_loop(tokens: TemplateTokens, num_samples: int, tool: str) -> None:
    """Ids without any meaning, four turns of them a sample, come back from the loop as they were sampled."""
    numbers = random.Random(3)
    sampled_ids: dict[tuple[int, int], list[int]] = {}
    vocabulary = max(tokens._tokenizer.get_vocab().values())
    end = min(tokens.eos_ids)

    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        noise = [numbers.randrange(vocabulary) for _ in range(numbers.randrange(30))]
        call_ids = [] if turn == 4 else list(tokens._encode_text(call("echo", text=str(turn))))
        sampled_ids[sample, turn] = [token for token in noise if token not in tokens.eos_ids] + call_ids + [end]
        return sampled_ids[sample, turn]

    settings = AgentLoopSettings(tools={"echo": ToolSettings(tool)}, describe_tools="never", max_conversations=5000)
    policy = ScriptedPolicy(script)
    found = talk(policy, settings, num_samples=num_samples, tokens=tokens).trajectories
    requested = {request.id: request for request in policy.requests}
    assert len(sampled_ids) == 4 * num_samples
    for completion in found:
        sampled = [number for turn in range(1, 5) for number in sampled_ids[completion.id.sample, turn]]
        assert completion.token_ids[completion.loss_mask].tolist() == sampled
        last = requested[f"test/0/0/{completion.id.sample}/3"].token_ids
        assert completion.token_ids[: len(last)].tolist() == list(last)


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo.py").write_text("def echo(text):\n    return text\n")
    return f"{tmp_path / 'echo.py'}:echo"


@pytest.mark.slow
def test_ids_that_are_not_text_pass_through_the_loop_unchanged(echo: str) -> None:
    check_loop(tokens_of(QWEN, "<|im_end|>"), 20, echo)


@pytest.mark.real
def test_case_25_ten_thousand_turns_of_random_ids_go_through_the_loop_unchanged(echo: str) -> None:
    check_loop(smollm2(), 2500, echo)


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (FORGETS, ["tool", "user"], "the role 'user' breaks it: a message of this role changes"),
        (REFUSES, ["tool"], "the role 'tool' breaks it: the template refuses it: .*no tools"),
        (THINKS, ["tool"], "the role 'assistant' breaks it: a response does not follow the opening"),
    ],
    ids=["forgets", "refuses", "thinks"],
)
def test_a_template_that_rewrites_is_refused_and_the_error_names_the_role(
    template: str, roles: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        tokens_of(template, "<|im_end|>").check_continuation(roles)


def test_a_template_that_forgets_at_users_serves_tools() -> None:
    tokens = tokens_of(FORGETS, "<|im_end|>")
    tokens.check_continuation(["tool"])
    with pytest.raises(ConfigError, match="the role 'user' breaks it"):
        tokens.check_continuation(["user"])


def test_the_loop_refuses_the_template_when_it_starts_and_names_its_key(echo: str) -> None:
    settings = AgentLoopSettings(tools={"echo": ToolSettings(echo)})
    with pytest.raises(ConfigError, match=r"'tool' breaks it.*plugins\.agent_loop\.result_role"):
        talk(ScriptedPolicy(lambda sample, turn, ids: [0]), settings, tokens=tokens_of(REFUSES, "<|im_end|>"))


def test_a_template_without_a_place_for_tools_is_refused_unless_the_system_prompt_tells(echo: str) -> None:
    plain = tokens_of(QWEN.replace("{%- if tools %}", "{%- if false %}"), "<|im_end|>")
    settings = AgentLoopSettings(tools={"echo": ToolSettings(echo)})
    with pytest.raises(ConfigError, match="describe_tools=template: the chat template does not describe tools"):
        talk(ScriptedPolicy(lambda sample, turn, ids: [0]), settings, tokens=plain)
