"""The strategy on a fake layer: its choice by hand, and the contract."""

from moe_loudest import strategy

from compressor.plugins import check_strategy, fake_statistics


def test_the_loudest_experts_stay() -> None:
    stats = fake_statistics(experts=8)
    mean = stats.norm_sum / stats.routed_count
    loudest = sorted(range(8), key=lambda expert: -float(mean[expert]))[:4]
    assert [group.members[0] for group in strategy.plan(stats, 4).groups] == sorted(loudest)


def test_the_contract_is_kept() -> None:
    check_strategy(strategy)
    check_strategy(strategy, {"count_power": 0.5})
