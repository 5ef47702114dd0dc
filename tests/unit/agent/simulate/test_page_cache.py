import random

import pytest

from agent.simulate.page_cache import PageCache

BLOCK = 4096


def hit_ratio(cache, blocks):
    hits = 0
    for file, block in blocks:
        if cache.look_up(file, block, BLOCK):
            hits += 1
        else:
            cache.insert(file, block, BLOCK)
    return hits / len(blocks)


def test_random_reads_hit_as_often_as_the_cache_holds_of_the_data():
    generator = random.Random(1)
    cache = PageCache(300 * BLOCK)
    reads = [(0, generator.randrange(1000)) for _ in range(30_000)]
    hit_ratio(cache, reads[:5000])
    assert hit_ratio(cache, reads[5000:]) == pytest.approx(0.3, abs=0.02)


def test_a_scan_larger_than_the_cache_never_hits():
    cache = PageCache(99 * BLOCK)
    assert hit_ratio(cache, [(0, number % 100) for number in range(1000)]) == 0.0


def test_data_that_fits_misses_once():
    cache = PageCache(100 * BLOCK)
    assert hit_ratio(cache, [(0, number % 100) for number in range(1000)]) == 0.9
    assert cache.used_bytes == 100 * BLOCK


def test_a_second_file_takes_the_place_of_the_first():
    cache = PageCache(100 * BLOCK)
    hit_ratio(cache, [(0, number) for number in range(100)])
    hit_ratio(cache, [(1, number) for number in range(100)])
    assert hit_ratio(cache, [(0, 99)]) == 0.0


def test_memory_is_never_exceeded_and_dropping_frees_it():
    generator = random.Random(2)
    cache = PageCache(50 * BLOCK)
    for _ in range(2000):
        cache.insert(generator.randrange(3), generator.randrange(60), BLOCK)
        assert cache.used_bytes <= 50 * BLOCK
    for file in range(3):
        cache.drop(file)
    assert cache.used_bytes == 0
