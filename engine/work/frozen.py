"""What was frozen at `plan` is what is sent: a change is refused with what changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from engine.campaign import Campaign, frozen_fingerprint
from engine.compose.keys import load_keys
from engine.compose.render import Composer, build_composer
from engine.config import Settings
from engine.errors import EngineError, Exit
from engine.pace.budgets import BUDGETS_FILE, bind_problems, load_budgets
from engine.rows import open_parquet
from formats.plan import Plan


class FrozenChanged(EngineError):
    """{what} changed since the plan of {campaign} was made."""

    exit_code = Exit.FROZEN
    hint = "Put it back. What is already sent cannot change; a different letter is a new campaign folder."


def planned_composer(
    campaign: Campaign,
    settings: Settings,
    plan: Plan,
    *,
    generation: Literal["live", "test"] = "live",
    selectors: Collection[str] = (),
) -> Composer:
    """The composer for the planned list, under the planned key; `selectors` are those of the sources."""
    schema = open_parquet(plan.files[0].path).schema_arrow
    return build_composer(
        settings, campaign.folder, schema, generation=generation, key_id=plan.key_id, selectors=selectors
    )


def selectors_of(campaign: Campaign, settings: Settings) -> set[str]:
    """The DKIM selectors that sources of budgets.toml name; raises BudgetError."""
    if settings.delivery.mode != "direct":
        return set()
    sources = load_budgets(campaign.folder / BUDGETS_FILE).sources
    return {source.dkim_selector for source in sources if source.dkim_selector is not None}


def check_frozen(campaign: Campaign, settings: Settings, plan: Plan) -> None:
    """Raises FrozenChanged where campaign id, settings, templates or keys are not the planned ones; KeysError."""

    def changed(what: str) -> FrozenChanged:
        return FrozenChanged(what=what, campaign=campaign.folder)

    if settings.campaign.id != plan.campaign_id:
        raise changed(f"campaign.id (planned: {plan.campaign_id!r}, now: {settings.campaign.id!r})")
    if frozen_fingerprint(settings) != plan.settings_fingerprint:
        raise changed("A setting outside [delivery], [retry] and [log] of campaign.toml")
    load_keys(campaign.folder / settings.keys.file).key(plan.key_id)
    if plan.files and plan.rows:
        composer = planned_composer(campaign, settings, plan, selectors=selectors_of(campaign, settings))
        if composer.fingerprint != plan.templates_fingerprint:
            raise changed("A template, image or attachment")


def check_sources(campaign: Campaign, settings: Settings) -> None:
    """Raises SourceCannotBeBound, BudgetError: rows of such a source would wait for a day. Weight 0 is out of use."""
    if settings.delivery.mode != "direct":
        return
    used = [source for source in load_budgets(campaign.folder / BUDGETS_FILE).sources if source.weight]
    for problem in bind_problems(tuple(used)):
        raise problem


def read_live(campaign: Campaign, plan: Plan) -> Settings:
    """The settings for a running sender; raises SettingsError, FrozenChanged."""
    settings = campaign.settings()
    if frozen_fingerprint(settings) != plan.settings_fingerprint:
        raise FrozenChanged(what="A setting outside [delivery], [retry] and [log]", campaign=campaign.folder)
    return settings
