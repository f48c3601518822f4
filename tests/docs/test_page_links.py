"""Links between pages lead somewhere: files exist, and so do anchors."""

from __future__ import annotations

import pytest
import yaml

from tests.docs.pages import all_paths, read_page, read_source, resolve, slug
from tests.paths import ROOT

PATHS = sorted(all_paths())


@pytest.mark.parametrize("path", PATHS)
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(path: str) -> None:
    page = read_page(path)
    broken = []
    for link in page.links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, anchor = resolve(page, link), link.partition("#")[2]
        exists = target in PATHS or (ROOT / target).exists()
        if not exists or (anchor and target in PATHS and anchor not in read_page(target).anchors):
            broken.append(link)
    assert not broken


def test_every_page_of_the_site_is_in_its_navigation_once() -> None:
    def listed(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries if isinstance(entries, list) else entries.values()  # type: ignore[attr-defined]  # a dict
        return [path for entry in values for path in listed(entry)]

    names = listed(yaml.safe_load(read_source("mkdocs.yml"))["nav"])
    assert sorted(f"docs/{name}" for name in names) == [path for path in PATHS if path.startswith("docs/")]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Exactness and limits", "exactness-and-limits"),
        ("Arguments of `dapple.pipeline`", "arguments-of-dapplepipeline"),
        ("K<sub>i</sub> of a stage", "ki-of-a-stage"),
    ],
)
def test_an_anchor_is_made_as_mkdocs_makes_it(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor
