"""The rule for verdicts: planted effects are found, planted nulls are not, and nothing is judged that was not
comparable."""

import numpy as np, pytest
from scipy.stats import bootstrap
from robust_nbdev.compare import (
    over_seeds,
    Claim,
    Difference,
    above_chance,
    judge,
    learned,
    paired,
    paired_reports,
    report_verdicts,
)
from robust_nbdev.evaluate import Report


def tables(effect, luck, seeds, n, rng):
    "Verdicts of two methods; each image is hard or easy for both, each run has luck of its own"
    hard = rng.random(n)

    def method(merit):
        own = rng.random((seeds, n)) < 0.1
        return np.where(own, rng.random((seeds, n)), hard) < merit + rng.normal(0, luck, (seeds, 1))

    return method(0.5 + effect), method(0.5)


def words(effect, luck, seeds, n=500, times=1000):
    rng, claim = np.random.default_rng(1), Claim('the first is better')
    return [judge(claim, paired(*tables(effect, luck, seeds, n, rng))).word for _ in range(times)]


@pytest.mark.parametrize('luck,seeds', [(0, 5), (0.03, 2)])
def test_no_effect_gets_a_verdict_at_most_once_in_twenty(luck, seeds):
    assert np.mean([w != 'not decided' for w in words(0, luck, seeds)]) <= 0.055


def test_the_interval_over_images_is_that_of_the_bootstrap():
    rng = np.random.default_rng(0)
    a, b = rng.random(1000) < 0.6, rng.random(1000) < 0.5
    d, ours = a.astype(float) - b, paired(a, b)
    ci = bootstrap((d,), np.mean, method='percentile', rng=np.random.default_rng(0)).confidence_interval
    assert abs(ours.low - ci.low) < 0.005 and abs(ours.high - ci.high) < 0.005


def test_models_that_never_disagree_are_not_known_to_be_equal():
    d = paired(np.ones(100), np.ones(100))
    assert d.value == 0 and d.low < -0.005 and d.high > 0.005 and d.p == 1


def test_weighed_verdicts_that_sum_to_the_same_are_a_tie():
    ".2 + .4 is not quite .6"
    a, b = [np.array(o)[:, None].repeat(4, 1) for o in ([0.2, 0.4, 0.0], [0.0, 0.0, 0.6])]
    d = paired(a, b)
    assert (d.wins, d.losses) == (0, 0)


def test_a_seed_more_of_the_same_kind_never_widens_by_much():
    rng = np.random.default_rng(0)
    a, b = tables(0.05, 0.01, 10, 500, rng)
    widths = [(o := paired(a[:k], b[:k])).high - o.low for k in (2, 3, 5, 10)]
    assert widths == sorted(widths, reverse=True)


def test_order_of_seeds_and_images_does_not_matter():
    rng = np.random.default_rng(0)
    a, b = tables(0.05, 0.01, 3, 300, rng)
    i, s = rng.permutation(300), [2, 0, 1]
    assert repr(paired(a, b)) == repr(paired(a[s][:, i], b[s][:, i]))


good = paired(np.tile(np.arange(400) < 200, (3, 1)), np.tile(np.arange(400) < 100, (3, 1)))


def test_a_baseline_at_chance_decides_nothing():
    assert judge(Claim('x'), good, learned(0.1, 10)).word == 'not testable here'
    assert judge(Claim('x'), good, [learned(0.5, 10), above_chance(0.11, 10, 400)]).word == 'not testable here'
    assert judge(Claim('x'), good, [learned(0.5, 10), above_chance(0.25, 10, 400)]).word == 'holds'


def test_two_classes_can_be_learned():
    assert learned(0.8, 2).met and not learned(0.6, 2).met


def test_one_seed_of_a_training_decides_nothing():
    one = paired(np.arange(400) < 200, np.arange(400) < 100)
    assert judge(Claim('x'), one).word == 'not testable here' and judge(Claim('x', trained=False), one).word == 'holds'


def test_a_real_but_tiny_effect_says_so():
    v = judge(Claim('x', least=0.3), good)
    assert v.word == 'holds' and 'smaller than the 30 points' in v.why


@pytest.mark.parametrize(
    'a,b,says',
    [
        (np.ones(3), np.ones(4), '3 images'),
        (np.ones((2, 4)), np.ones((3, 4)), '2 seeds'),
        (np.ones(1), np.ones(1), 'at least two'),
        (np.full(4, 2.0), np.ones(4), 'between 0'),
        (np.full(4, np.nan), np.ones(4), 'between 0'),
    ],
)
def test_what_cannot_be_paired_is_refused(a, b, says):
    with pytest.raises(ValueError, match=says):
        paired(a, b)


def report(data, ok):
    return Report(dict(data=data, n=len(ok), title='', seed=0, draws=1), [], {'clean': np.ones(len(ok)), 'PGD': ok})


def test_reports_of_several_seeds():
    a, b = [report('x', np.arange(10) < k) for k in (5, 6)], [report('x', np.arange(10) < k) for k in (4, 4)]
    d = paired_reports(a, b)
    assert (d.seeds, d.n) == (2, 10) and abs(d.value - 0.15) < 1e-9 and paired_reports(a, b, 'clean').value == 0


def test_reports_on_other_images_or_without_the_row_are_refused():
    a, b = report('x', np.ones(4)), report('y', np.ones(4))
    with pytest.raises(ValueError, match='different images'):
        paired_reports(a, b)
    with pytest.raises(ValueError, match='different images'):
        report_verdicts([a, b])
    with pytest.raises(ValueError, match='no row FGSM'):
        report_verdicts(a, 'FGSM')


# --- the same attacks
# ------------------------------------------------------------------------------------------------------------


def attacked(names, ids, k=4):
    "A report with a row for each attack, whose identity is given"
    ok = {n: np.arange(10) < k for n in names}
    return Report(
        dict(data='x', n=10),
        [dict(attack='clean'), *[dict(attack=n, identity=i) for n, i in zip(names, ids)]],
        {'clean': np.ones(10), **ok},
    )


@pytest.mark.parametrize('attack', ['PGD', None])
def test_attacks_that_only_print_alike_are_not_paired(attack):
    a, b = attacked(['PGD'], ['1']), attacked(['PGD'], ['2'])
    for call in (
        lambda: paired_reports(a, b, attack),
        lambda: paired_reports([a, b], [a, a], attack),
        lambda: report_verdicts([a, b], attack),
    ):
        with pytest.raises(ValueError, match='rows PGD are of attacks that print alike'):
            call()
    assert (
        paired_reports(a, attacked(['PGD'], ['1'], 2), attack).value > 0.1 and paired_reports(a, b, 'clean').value == 0
    )


def test_the_worst_case_is_over_the_same_attacks():
    a, b = attacked(['FGSM'], ['1']), attacked(['FGSM', 'PGD'], ['1', '2'])
    for call in (lambda: paired_reports(a, b), lambda: report_verdicts([a, b])):
        with pytest.raises(ValueError, match=r"\['PGD'\] are not in both"):
            call()
    assert paired_reports(a, b, 'FGSM').value == 0


def test_an_attack_that_cannot_be_read_is_told():
    with pytest.warns(UserWarning, match='may not have been the same'):
        paired_reports(attacked(['PGD'], ['']), attacked(['PGD'], ['']))


def test_numbers_of_runs_are_compared_seed_by_seed():
    "As scipy's paired t-test has the interval; a single run has none"
    from scipy.stats import ttest_rel

    a, b = [0.5, 0.7, 0.4, 0.65], [0.45, 0.5, 0.42, 0.5]
    found, known = over_seeds(a, b, 100), ttest_rel(a, b).confidence_interval(0.95)
    assert [found.low, found.high] == pytest.approx([known.low, known.high]) and (found.wins, found.losses) == (3, 1)
    for one in ([0.5], [[0.5, 0.6]]):
        with pytest.raises(ValueError, match='of two runs at least'):
            over_seeds(one, one, 100)


def test_the_reason_names_the_smallest_effect_of_several_readings():
    big, small = [Difference(v, v - 0.01, v + 0.01, 100, 3, 9, 1) for v in (0.2, 0.03)]
    for readings in (dict(a=big, b=small), dict(b=small, a=big)):
        assert 'smaller than the 10 points that matter' in judge(Claim('it helps', least=0.1), readings).why
