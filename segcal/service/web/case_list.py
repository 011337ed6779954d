"""All cases in one table that can be sorted, filtered and searched; every state of it is an address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse

from segcal.service.api.common import Text
from segcal.service.store import CaseFilter, CaseOrder, Store
from segcal.service.web.render import PageRoute, address, page

PAGE_CASES = 50

Look = Literal["", "flagged", "not_flagged", "failed"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        title, hint: its heading, and what it says in a few words.
        sort: by what the store sorts for it; None when it does not.
        first_descending: which way it sorts when first asked, the worst on top.
    """

    title: str
    hint: str
    sort: CaseOrder | None
    first_descending: bool = False


COLUMNS = (
    Column("case", "open it to see its slices, flags and volumes", "case"),
    Column("flags", "number of reasons to look at it; worst first", "worst"),
    Column("expected DSC (%)", "mean over the segmented classes, from the calibrated probabilities", "expected_dsc"),
    Column("boundary confidence (%)", "mean confidence near the predicted boundary", "boundary_confidence"),
    Column("member disagreement (%)", "two members differ at a voxel near the boundary", "disagreement", True),
    Column("outlyingness", "largest |robust z-score| against the calibration cases", "outlyingness", True),
    Column("batch", "what it was submitted under", None),
    Column("day", "when its job finished, in UTC", "newest"),
)


@dataclass(frozen=True, slots=True)
class Heading:
    """A column with the address that sorts by it; `order` is for `aria-sort`."""

    column: Column
    href: str | None
    order: Literal["ascending", "descending"] | None


def case_list_routes(store: Store) -> APIRouter:
    """GET /cases."""
    routes = APIRouter(route_class=PageRoute, include_in_schema=False)

    @routes.get("/cases")
    def cases(
        request: Request,
        search: Text = "",
        batch: Text = "",
        day: Annotated[str, Query(pattern=r"^(\d{4}-\d\d-\d\d)?$")] = "",
        calibrator: Text = "",
        look: Look = "",
        sort: CaseOrder = "worst",
        descending: bool = False,
        start: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    ) -> HTMLResponse:
        chosen: CaseFilter = {
            "search": search,
            "batch": batch or None,
            "day": day or None,
            "calibrator": calibrator or None,
            "flagged": {"flagged": True, "not_flagged": False}.get(look),
            "status": "failed" if look == "failed" else "ok" if look == "not_flagged" else None,
        }
        n_cases = store.cases.count(**chosen)
        given = {"search": search, "batch": batch, "day": day, "calibrator": calibrator, "look": look}
        order = {"sort": sort, "descending": "1" if descending else ""}
        return page(
            request,
            "cases.html.j2",
            records=store.cases.page(**chosen, sort=sort, descending=descending, limit=PAGE_CASES, offset=start),
            n_cases=n_cases,
            headings=[_heading(column, sort, descending, given) for column in COLUMNS],
            batches=sorted({each.batch for each in store.cases.days(500)} | ({batch} if batch else set())),
            calibrators=store.calibrators.list(),
            given=given,
            order=order,
            filtered=any(given.values()),
            start=start,
            page_cases=PAGE_CASES,
            before=address("/cases", {**given, **order, "start": max(0, start - PAGE_CASES)}) if start else None,
            after=address("/cases", {**given, **order, "start": start + PAGE_CASES})
            if start + PAGE_CASES < n_cases
            else None,
        )

    return routes


def _heading(column: Column, sort: CaseOrder, descending: bool, given: dict[str, str]) -> Heading:
    if column.sort is None:
        return Heading(column, None, None)
    current = column.sort == sort
    turn = not descending if current else column.first_descending
    href = address("/cases", {**given, "sort": column.sort, "descending": "1" if turn else ""})
    # The store's own direction of `worst` and `newest` is the largest number first.
    falls = descending != (column.sort in ("worst", "newest"))
    return Heading(column, href, ("descending" if falls else "ascending") if current else None)
