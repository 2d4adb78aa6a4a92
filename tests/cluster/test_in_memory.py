"""Races in the in-memory cluster, which a test has to provoke."""

from cluster.in_memory import InMemoryCluster
from cluster.in_memory_admission import InMemoryWebhook, Review
from cluster.objects import CONFIG_MAPS
from tests.cluster.hooks import respond
from tests.cluster.objects import config_map


def test_a_patch_is_merged_again_if_another_write_came_first() -> None:
    """Webhooks are called outside the lock, so another write may come in between; neither undoes the other."""
    cluster = InMemoryCluster()
    cluster.create(CONFIG_MAPS, config_map("default", "one"))
    has_overtaken = False

    def overtake(review: Review) -> Review:
        nonlocal has_overtaken
        if not has_overtaken:
            has_overtaken = True
            cluster.patch(CONFIG_MAPS, "one", "default", {"data": {"theirs": "x"}})
        return respond(review)

    cluster.hooks.append(
        InMemoryWebhook("slow.quotient.test", overtake, resources=("configmaps",), operations=("UPDATE",))
    )
    assert cluster.patch(CONFIG_MAPS, "one", "default", {"data": {"ours": "x"}}).data == {"ours": "x", "theirs": "x"}
