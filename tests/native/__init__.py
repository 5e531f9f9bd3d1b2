"""What tests of compiled kernels share."""

import pytest

from engine import native

needs_compiler = pytest.mark.skipif(isinstance(native.find_compiler(), str), reason=str(native.find_compiler()))
