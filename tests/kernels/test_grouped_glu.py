"""The kernels of a grouped GLU, compared with their references; `test_quantize.py` runs the interpreter."""

import pytest

from tests.kernels import glu_cases as cases


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_codes_are_those_of_the_references_on_a_gpu(case: cases.Case) -> None:
    assert cases.wrong(case) == {}
