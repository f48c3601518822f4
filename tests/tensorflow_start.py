"""Start TensorFlow with eight logical devices, once in a process; each folder of tests that need it has a conftest.py.

It must start before any module of tests makes a tensor, since the number of devices cannot change after that. pytest
imports a folder's conftest.py before its modules. Tests of ``graph_passes`` start no TensorFlow.
"""

from __future__ import annotations

import dapple_tf as dapple

dapple.init(8)
