"""The cluster in memory, where a race has to be made to happen."""

from cluster.in_memory import InMemoryCluster
from cluster.in_memory_admission import InMemoryWebhook, Review
from cluster.objects import CONFIG_MAPS
from tests.cluster.hooks import answered
from tests.cluster.objects import config_map


def test_a_patch_that_was_overtaken_is_merged_again() -> None:
    """Admission is asked outside the lock, so another write may come first; neither undoes the other."""
    cluster = InMemoryCluster()
    cluster.create(CONFIG_MAPS, config_map("default", "one"))
    overtaken = False

    def overtake(review: Review) -> Review:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            cluster.patch(CONFIG_MAPS, "one", "default", {"data": {"theirs": "x"}})
        return answered(review)

    cluster.hooks.append(
        InMemoryWebhook("slow.quotient.test", overtake, resources=("configmaps",), operations=("UPDATE",))
    )
    assert cluster.patch(CONFIG_MAPS, "one", "default", {"data": {"ours": "x"}}).data == {"ours": "x", "theirs": "x"}
