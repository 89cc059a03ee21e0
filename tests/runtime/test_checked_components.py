"""Components behind the checks of what they hand over: their state and their scope."""

from typing import Any

import pytest

from rlcore.errors import PluginError
from rlcore.runtime.checked_components import CheckedRewards


@pytest.mark.parametrize("found", [None, [1], "text"])
def test_a_state_that_is_not_a_dict_and_a_scope_as_text_are_named(found: Any) -> None:
    class Odd:
        scope = found

        def state(self) -> Any:
            return found

    with pytest.raises(PluginError, match=r"^reward 'r': state\(\) returned (NoneType|None|list|str); needs a dict"):
        CheckedRewards(Odd(), "reward 'r'").state()
    with pytest.raises(PluginError, match=r"^reward 'r': scope returned (None|list|str); needs a member of Scope"):
        CheckedRewards(Odd(), "reward 'r'").scope  # noqa: B018
