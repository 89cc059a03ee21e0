"""Settings that Ray cannot heed and pools that it cannot place are refused when the run is planned."""

import pytest

from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS

WHEN = " used only when plugins.ray.address == ''"
JOINED = ("plugins.ray.address=10.0.0.1:6379",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*JOINED, "plugins.ray.object_store_gib=1"),
            "plugins.ray.object_store_gib: set to 1.* has no effect: it is" + WHEN,
        ),
        (
            (*JOINED, "plugins.ray.dashboard=true"),
            "plugins.ray.dashboard: set to True.* has no effect: it is" + WHEN,
        ),
        (("plugins.ray.address=127.0.0.1:99999",), "needs the host:port of a Ray head"),
        (("plugins.ray.address=127.0.0.1:0",), "needs the host:port of a Ray head"),
        (("plugins.ray.address=ray://10.0.0.1:10001",), "found 'ray://10.0.0.1:10001'; needs the"),
    ],
)
def test_settings_that_a_joined_cluster_cannot_heed_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_run([], [*SETTINGS, *overrides], ["null"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "auto", "head.cluster.local:6379"])
def test_addresses_of_heads_are_taken(address: str) -> None:
    settings = [*SETTINGS, f"plugins.ray.address={address}"]
    assert plan_run([], settings, ["null"]).config.plugins["ray"].address == address
