"""All routes of the page; they are not part of the OpenAPI document."""

from fastapi import APIRouter

from service.page import events, jobs, samples, schedules, sign_in, static, workers

router = APIRouter(include_in_schema=False)
for _module in (jobs, samples, events, schedules, workers, sign_in, static):
    router.include_router(_module.router)
