"""The C unit tests of kernels, data, formulas and schedules (cmocka), in every build that they can tell apart."""
import subprocess

import pytest

from conftest import ROOT, environment, make

NAMES = ["test_kernels", "test_matmul", "test_attention", "test_data", "test_report", "test_schedule"]
BUILDS = {"fp32": [], "bf16": ["PRECISION=bf16"], "sanitized": ["SANITIZE=address,undefined"]}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", NAMES)
def test_units(name, build):
    precision = "bf16" if build == "bf16" else "fp32"
    variant = f"cpu-{precision}{'-sanitized' if build == 'sanitized' else ''}"
    program = make(f"build/{variant}/tests/{name}", *BUILDS[build])
    env = environment(ASAN_OPTIONS="detect_leaks=0")
    r = subprocess.run([program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stdout + r.stderr
