"""Is every barrier, wait, commit and guard of the CUDA kernels needed, and would the tests notice? (make mutants)

The emulator lists the sites that a run passes, and can leave one out. For each site of each operation: the operation's small
runs (SMALL in tests/test_cuda_*.py) with it left out, on the emulator that watches every access, must fail somewhere: an
error by name, other bits than with it, a crash, or no end. What survives is listed, with its reason, in
kernel_mutants_survivors.txt; at most one in twenty may be."""
import ctypes
import importlib
import pathlib

import pytest

from conftest import ROOT
from kernels import PRECISIONS, Kernels, in_child, library, raw

SECONDS = 60  # for one small run that may hang
SEEDS = (0, 1, 2)
SURVIVORS = pathlib.Path(__file__).with_name("kernel_mutants_survivors.txt")
MODULES = sorted(p.stem for p in (ROOT / "tests").glob("test_cuda_*.py") if "\nSMALL = " in p.read_text())


def attempt(run, precision, seed, site=None):
    """One small run, in a process of its own → ("done", (its bits, the sites it passed)) or ("failed", why)."""

    def child():
        with Kernels("emu", precision, checked=True) as k:
            k.seed(seed)
            k.lib.emu_set_skip(site and site.encode())
            bits = {name: raw(array) for name, array in run(k).items()}
            k.lib.emu_sites.restype = ctypes.c_size_t
            text = ctypes.create_string_buffer(k.lib.emu_sites(None, 0, False))
            k.lib.emu_sites(text, len(text), False)
        return bits, [line.split()[:2] for line in text.value.decode().splitlines()]

    return in_child(child, SECONDS)


def kills(runs, site):
    """What notices that the site is left out: "" if nothing does."""
    for (name, precision), (run, bits, passed) in runs.items():
        if site not in passed:
            continue
        for seed in SEEDS:
            kind, value = attempt(run, precision, seed, site)
            if kind != "done":
                return f"{name}, {precision}, seed {seed}: {value.strip().splitlines()[-1]}"
            if value[0] != bits:
                return f"{name}, {precision}, seed {seed}: other bits"
    return ""


def source_line(site):
    file, line = site.rsplit(":", 1)
    return file, (ROOT / file).read_text().splitlines()[int(line) - 1].strip()


def excused():
    """{(operation, file, the line of the source)} that may survive. Lines of the list: operation | file | line | reason."""
    lines = [line.split(" | ") for line in SURVIVORS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(len(parts) == 4 and parts[3].strip() for parts in lines), "operation | file | line | reason"
    return {tuple(part.strip() for part in parts[:3]) for parts in lines}


results = {}  # module: (sites, survivors)


def whole(module):
    """The module's small runs with nothing left out: {(name, precision): (run, bits, sites passed)}, {site: kind}.

    Whatever the order of blocks, warps and threads, they have the same bits, and the emulator has nothing to say."""
    runs, sites = {}, {}
    for precision in PRECISIONS:
        library("emu", precision, checked=True)
        for name, run in importlib.import_module(module).SMALL:
            bits, passed = None, []
            for seed in SEEDS:
                kind, value = attempt(run, precision, seed)
                assert kind == "done", f"{name}, {precision}, seed {seed}, nothing left out: {value}"
                bits, passed = bits or value[0], passed or value[1]
                assert value[0] == bits, f"{name}, {precision}, seed {seed}: other bits"
            runs[name, precision] = (run, bits, {site for _, site in passed})
            sites.update((site, kind) for kind, site in passed)
    return runs, sites


@pytest.mark.parametrize("module", MODULES)
def test_no_race_and_nothing_out_of_bounds(module):
    runs, sites = whole(module)
    assert runs and sites


@pytest.mark.mutants
@pytest.mark.parametrize("module", MODULES)
def test_every_site_is_needed(module):
    runs, sites = whole(module)
    survivors = []
    for site, kind in sorted(sites.items()):
        why = kills(runs, site)
        print(f"{'killed ' if why else 'SURVIVED'} {kind:8} {site:36} {why}")
        if not why:
            survivors.append(site)
    results[module] = (len(sites), survivors)
    here = {(module, *source_line(site)): site for site in survivors}
    listed = {entry for entry in excused() if entry[0] == module}
    assert set(here) == listed, f"survive, not listed: {[here[e] for e in here if e not in listed]}; listed, but dead: {listed - set(here)}"


@pytest.mark.mutants
def test_few_survive():
    total, survivors = sum(n for n, _ in results.values()), sum(len(s) for _, s in results.values())
    print(f"{total - survivors} of {total} mutants of the kernels killed")
    assert set(results) == set(MODULES) and total and survivors <= total / 20, results
