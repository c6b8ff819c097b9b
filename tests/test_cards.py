"""The table of cards, predictions for them, and the kernels that the routes choose there: they compile, and fit."""

from __future__ import annotations

import itertools
import re

import compile_kernels
import pytest

import qgemm
from qgemm.cuda import cards, tuner
from qgemm.cuda.jit import codegen, nvrtc
from qgemm.cuda.jit.cache import cached
from qgemm.cuda.kernels import decode, decode_config, routes
from qgemm.cuda.problem import Problem

CARDS = cards.cards()
every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
FLOPS = (512, 1024, 2048, 4096)  # dense operations of float16 of an SM in a clock, by architecture
Q4_0 = qgemm.FORMATS["q4_0"]
ROWS = (1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 256, 512, 1024, 4096)


def product(card, m, n=4096, k=4096, activation="a16", fmt=Q4_0):
    return Problem(fmt, activation, m, n, k, card.sm, sms=card.sms)


@every_card
def test_the_rates_of_a_card_are_those_of_its_sms(card):
    """Operations in a clock are a power of two; GeForce cards have half the rate with float32 sums, and no other."""
    of_sm = card.fp16 * 1e6 / (card.sms * card.mhz)
    assert min(abs(of_sm / flops - 1) for flops in FLOPS) < 0.025
    halved = round(card.fp16_sums / card.fp16)
    assert halved in (1, 2)
    assert card.fp16_sums == pytest.approx(halved * card.fp16, rel=0.01)
    assert card.int8 == pytest.approx(2 * card.fp16_sums, rel=0.02)
    assert card.fp8 == 0 if card.sm < 89 else card.fp8 == pytest.approx(card.int8 / halved, rel=0.01)
    assert f"sm_{card.sm}" in {arch.rstrip("a") for arch in nvrtc.ARCHS}
    assert card.shared_kb == decode_config.SHARED[card.sm]
    assert card.source.startswith("https://")
    assert card.measured == (card.sm == 90)


def test_cards_are_found_by_their_names():
    assert {cards.card(card.name) for card in CARDS} == set(CARDS)
    assert cards.card("NVIDIA GeForce RTX 4090") is cards.card("rtx-4090") is cards.card("RTX 4090")
    with pytest.raises(qgemm.UnsupportedError, match="close are rtx 5090, rtx 4090"):
        cards.card("RTX 6090")
    with pytest.raises(qgemm.UnsupportedError, match="there are RTX 2080 Ti, T4"):
        cards.card("abacus")


@every_card
@pytest.mark.parametrize("activation", ["a16", "a8", "a8_g256"])
def test_no_product_is_predicted_faster_than_the_card_can_be(card, activation):
    """Memory and tensor cores at their full rates; the limit is one of those named."""
    for m, (n, k) in itertools.product(ROWS, ((1024, 4096), (8192, 8192))):
        if card.sm < 80 and activation == "a8_g256":
            continue
        us = cards.predicted(product(card, m, n, k, activation), card).us
        assert us >= n * k * 4.5 / 8 / (card.memory_gbs * 1e3)
        assert us >= 2 * m * n * k / (card.rate(activation) * 1e6)


@every_card
def test_more_work_lasts_longer(card):
    """By one kernel: more rows of x, of W, more columns."""
    for activation in ("a16", "a8"):
        for sizes in (
            [(m, 4096, 4096) for m in ROWS], [(64, n, 4096) for n in (1024, 2048, 4096, 8192, 16384)],
            [(64, 4096, k) for k in (1024, 2048, 4096, 8192, 16384)],
        ):  # fmt: skip
            predictions = [cards.predicted(product(card, *size, activation), card) for size in sizes]
            for less, more in itertools.pairwise(predictions):
                if less.kernel is more.kernel:
                    assert less.us <= more.us * (1 + 1e-9)


@every_card
@pytest.mark.parametrize("m", [1, 64, 512])
def test_a_faster_card_is_predicted_faster(card, m):
    """More bandwidth, tensor cores, clock: none of them makes a product slower, and all together make it faster."""
    us = cards.predicted(product(card, m), card).us
    faster = {"memory_gbs": 2 * card.memory_gbs, "mhz": 2 * card.mhz, "fp16": 2 * card.fp16, "int8": 2 * card.int8}
    for name, value in faster.items():
        assert cards.predicted(product(card, m), card._replace(**{name: value})).us <= us
    assert cards.predicted(product(card, m), card._replace(**faster)).us < us


def test_a_card_of_half_rate_has_a_reason_for_int8():
    """What docs/gpus.md recommends: with many rows a GeForce is fastest by int8."""
    for card in CARDS:
        if card.sm >= 80 and card.fp16_sums > 1.5 * card.fp16:
            us = {a: cards.predicted(product(card, 512, activation=a), card).us for a in ("a16", "a8", "a8_g256")}
            assert us["a8_g256"] < us["a8"] < us["a16"]


def chosen(fmt, sm, sms):
    """The kernels, problems and configs that the routes choose for products on a card."""
    for activation, m in itertools.product(("a16", "a8", "a8_g256"), (1, 8, 16, 64, 512, 4096)):
        p = Problem(fmt, activation, m, 4096, 4096, sm, sms=sms)
        if any(row.fits(p) for row in routes.ROUTES):
            kernel = routes.route(p).kernel
            for source in kernel.reads(p):
                of_source = p._replace(x=source)
                yield kernel, of_source, kernel.choose(of_source)


def dynamic_bytes(kernel, p, config):
    """Dynamic shared memory of a CTA, without the barriers that decode reserves."""
    template = kernel.template(p, config)
    if kernel.source == decode.SOURCE:
        return decode.shared_bytes(kernel.name, p.format, config, template, p.sm)
    return int(template.get("SMEM_BYTES", 0))


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q8_0", "iq4_nl", "q2_k", "kbit3"])
def test_every_candidate_fits_into_the_shared_memory_of_its_card(name):
    """All that `qgemm tune` would launch there, the choice without times first."""
    for card in {card.sm: card for card in CARDS}.values():
        for kernel, p, _ in chosen(qgemm.FORMATS[name], card.sm, card.sms):
            for candidate in tuner.candidates(p._replace(x="half")):
                if candidate.config is not None:
                    for source in candidate.kernel.reads(p):
                        size = dynamic_bytes(candidate.kernel, p._replace(x=source), candidate.config)
                        assert size <= card.shared_kb << 10, (card.name, kernel, str(candidate.config))


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "sm"), [("q4_0", 86), ("iq4_nl", 89), ("q4_k", 120)])
def test_every_choice_compiles_and_fits_with_what_the_compiler_adds(name, sm):
    """Static shared memory and registers by ptxas; no kernel that a card would launch spills more than it may.

    tools/compile_kernels.py compiles all formats for all architectures, and lists the exceptions.
    """
    fmt = qgemm.FORMATS[name]
    (sms, shared_kb), *_ = [(card.sms, card.shared_kb) for card in CARDS if card.sm == sm]
    units = {}
    for kernel, p, config in chosen(fmt, sm, sms):
        if config is not None:
            template = kernel.template(p, config)
            unit = routes.source_of(kernel.name), tuple(template.items())
            units[unit] = dynamic_bytes(kernel, p, config)
    for (source, template), size in units.items():
        report = cached(codegen.compose(source, fmt, **dict(template)), f"sm_{sm}", codegen.headers(fmt)).report
        static = max(map(int, re.findall(r"(\d+) bytes smem", report)), default=0)
        assert static + size <= shared_kb << 10, (source, template)
        used = compile_kernels.resources(report)
        assert used.registers <= 255
        allowed = compile_kernels.allowed_to_spill(compile_kernels.Unit(source, name, template, f"sm_{sm}"))
        assert used.spilled <= allowed, (source, template)


def test_the_command_prints_predictions_for_a_card(run):
    status, out, err = run("routes", "--gpu", "RTX 4090")
    assert (status, err) == (0, "")
    assert "128 SMs" in out
    assert "were never measured" in out
    assert "prefill_sm80" in out
    assert "were never measured" not in run("routes", "--gpu", "H200")[1]
    problem = "q4_0 a16 M=64 N=8192 K=8192"
    out = run("routes", "--gpu", "rtx 3090", "--problem", problem)[1]
    assert "on sm_86, 82 SMs: prefill_sm80" in out
    assert "tensor cores" in out
    for words in (("--gpu", "RTX 4090", "--sm", "90"), ("--gpu", "abacus")):
        assert run("routes", *words)[0] == 2
