"""Package metadata of dapple_tf; the tools' settings are in pyproject.toml."""

import re
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
NATIVE = "dapple_tf/simulator/native"
INSTALL_HOROVOD = "dapple_tf/distributed/horovod/install.sh"
LIBRARY = runpy.run_path(str(HERE / NATIVE / "library.py"))
HOROVOD = re.search(r'^requirement="(.+?)"', (HERE / INSTALL_HOROVOD).read_text("utf-8"), re.MULTILINE)
VERSION = re.search(r'^__version__ = "(.+?)"', (HERE / "dapple_tf/__init__.py").read_text("utf-8"), re.MULTILINE)

setup(
    name="dapple_tf",
    version=VERSION[1],
    description="A compiler and runtime for pipelined training in TensorFlow 2",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    author="The dapple_tf authors",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.14",
    package_dir={"": "."},
    packages=find_packages(include=["dapple_tf*"]),  # dapple_tf/graph_passes and dapple_tf/profiler are links
    package_data={
        "": ["py.typed"],
        "dapple_tf.distributed.horovod": ["install.sh", "shim/**/*.h"],
        "dapple_tf.distributed.native": ["*.h", "*.cc"],  # compiled where it is used, for the TensorFlow there
        "dapple_tf.simulator.native": ["*.h", "*.cc"],  # its digest is that of these; compiled again if they change
    },
    ext_modules=[
        Extension(
            "dapple_tf.simulator.native.planner",
            sources=[f"{NATIVE}/planner.cc"],
            depends=[f"{NATIVE}/{header.name}" for header in LIBRARY["HEADERS"]],
            define_macros=[(LIBRARY["DIGEST_MACRO"], f'"{LIBRARY["source_digest"]()}"')],
            extra_compile_args=list(LIBRARY["COMPILE_OPTIONS"]),
            extra_link_args=list(LIBRARY["LINK_OPTIONS"]),
            language="c++",
            optional=True,  # without a compiler, planner "best" chooses among simpler plans and says so
        )
    ],
    install_requires=[
        # TensorFlow comes with the extra "cpu" or "gpu"; Keras does not install it either.
        "keras>=3.9,<4",
        "numpy>=1.26,<3",
        "protobuf",  # TensorFlow restricts the versions
        "networkx>=3.2,<4",
        "PyYAML>=6,<7",
        # Checks the files that are read. profiler/records.py makes its messages from the text of those of msgspec,
        # which a later minor version may word in another way.
        "msgspec>=0.22,<0.23",
        "click>=8.1,<9",
        "cloup>=3,<5",  # groups of options in click's help
        "rich>=13,<16",
        "matplotlib>=3.8,<4",
        "typing_extensions>=4.6,<5",  # Unpack, before Python 3.11
    ],
    extras_require={
        # Both install the module `tensorflow`, so only one of them may be installed. The oldest version is also in
        # dapple_tf/frontend/tensorflow_version.py, which checks it at `import dapple_tf`; `make matrix` tests others.
        "cpu": ["tensorflow-cpu>=2.17"],
        "gpu": ["tensorflow[and-cuda]>=2.17"],
        # pip alone cannot build it against TensorFlow 2.16 or later: `python -m dapple_tf.distributed.horovod` can.
        "horovod": [HOROVOD[1]],
        "docs": [
            "mkdocs>=1.6,<2",  # 1.6 brought File.generated, which docs/site_hooks.py uses; the theme needs 1
            "mkdocs-material>=9.6,<10",  # a new major version may change the settings in mkdocs.yml
            "mkdocstrings[python]>=1,<2",  # so may a new one of this
        ],
        "test": [
            "pytest>=9,<9.1",  # 9.1 loses fixtures of a folder whose files are named before and after one of its parent
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            # The tests build a wheel with the setuptools of this environment, so that they need no network. It makes
            # wheels from 70.1 on; 81 and later lack pkg_resources, which Horovod's build needs in this environment.
            "build>=1.2,<2",
            "setuptools>=70.1,<81",
            # Linters are held to a minor version: a newer one may find fault with unchanged code.
            "ruff==0.17.*",
            "mypy==2.4.*",
            "import-linter>=2.15,<3",
            "types-networkx>=3.2,<4",
            "types-PyYAML>=6,<7",
        ],
    },
    entry_points={"console_scripts": ["dapple = dapple_tf.cli:main"]},
)
