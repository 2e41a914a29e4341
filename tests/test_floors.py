"""The import rules that hang on a file's name, which the contracts of setup.cfg cannot write.

A new method is one file: no rule here or there lists the methods.
"""

from __future__ import annotations

import grimp
import pytest

PACKAGE = "adapterzoo"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        PACKAGE,
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )


def meetings(graph: grimp.ImportGraph, package: str) -> set[tuple[str, str]]:
    """Imports from a file of the package to a sibling that is not machinery.

    Machinery is `_name.py`.
    """
    files = graph.find_children(package)
    return {
        (importer, imported)
        for importer in files
        for imported in graph.find_modules_directly_imported_by(importer)
        if imported == package
        or (imported in files and not imported.rpartition(".")[2].startswith("_"))
    }


def strays(graph: grimp.ImportGraph, library: str, legal: tuple[str, ...]) -> set[str]:
    """Modules that import a library and whose names neither start nor end as is legal."""
    if library not in graph.modules:
        return set()
    return {
        importer
        for importer in graph.find_modules_that_directly_import(library)
        if not any(importer.startswith(part) or importer.endswith(part) for part in legal)
    }


@pytest.mark.parametrize("package", [f"{PACKAGE}.methods", f"{PACKAGE}.heads"])
def test_files_are_blind_to_their_siblings(graph, package):
    assert graph.find_children(package)
    assert meetings(graph, package) == set()


def test_triton_is_imported_by_its_kernels_only(graph):
    assert strays(graph, "triton", ("_triton",)) == set()


def test_the_hub_is_reached_from_one_module_only(graph):
    assert strays(graph, "huggingface_hub", (f"{PACKAGE}.hub",)) == set()


def test_the_checks_bite():
    graph = grimp.ImportGraph()
    for module in ("z", "z.methods", "z.methods._init", "z.methods.dora", "z.methods.lora"):
        graph.add_module(module)
    for module in ("triton", "z.kernels.butterfly", "z.kernels.butterfly_triton"):
        graph.add_module(module)
    graph.add_import(importer="z.methods.lora", imported="z.methods._init")
    graph.add_import(importer="z.kernels.butterfly_triton", imported="triton")
    assert meetings(graph, "z.methods") == set()
    assert strays(graph, "triton", ("_triton",)) == set()

    graph.add_import(importer="z.methods.dora", imported="z.methods.lora")
    graph.add_import(importer="z.methods.lora", imported="z.methods")
    graph.add_import(importer="z.kernels.butterfly", imported="triton")
    assert meetings(graph, "z.methods") == {
        ("z.methods.dora", "z.methods.lora"),
        ("z.methods.lora", "z.methods"),
    }
    assert strays(graph, "triton", ("_triton",)) == {"z.kernels.butterfly"}
