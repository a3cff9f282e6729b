"""Recognises services' API keys by their form (a known prefix, followed by as many letters and digits as that service
uses), and URLs that grant access without a key. Harmless text does not match these forms by chance."""

from __future__ import annotations

import re
from collections.abc import Iterator

_START = r"(?:(?<![\w\-])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""Matches where a word begins, which may also be after an escape sequence of JSON or of a URL."""
_DIGIT = r"(?=[\w\-]*\d)"
_MIXED = _DIGIT + r"(?=[\w\-]*[A-Z])(?=[\w\-]*[a-z])"

_TOKENS = (
    ("xai-", r"[A-Za-z0-9]{40,}"),
    ("pplx-", r"[A-Za-z0-9]{40,}"),
    ("r8_", r"[A-Za-z0-9]{32,}"),
    ("SG.", r"[\w\-]{16,32}\.[\w\-]{30,}"),
    ("tvly-", rf"(?:dev-|prod-)?{_DIGIT}[A-Za-z0-9][\w\-]{{19,}}"),
    ("lsv2_", rf"(?:pt|sk)_{_DIGIT}\w{{24,}}"),
    ("ls__", r"[0-9a-f]{32}"),
    ("dop_v1_", r"[0-9a-f]{40,}"),
    ("doo_v1_", r"[0-9a-f]{40,}"),
    ("dor_v1_", r"[0-9a-f]{40,}"),
    ("shp", r"(?:at|ca|pa|ss)_[0-9A-Fa-f]{32}"),
    ("glpat-", rf"{_MIXED}[\w\-]{{20,}}"),
    ("gl", rf"(?:dt|rt|ptt|ft|imt|agent|soat|cbt|oas)-{_MIXED}[\w\-]{{20,}}"),
    ("glsa_", rf"{_DIGIT}\w{{32,}}"),
    ("glc_", r"eyJ[\w+/=]{32,}"),
    ("AKIA", r"(?=[A-Z]*\d)[A-Z0-9]{16}\b"),
    ("ASIA", r"(?=[A-Z]*\d)[A-Z0-9]{16}\b"),
    ("LTAI", rf"{_MIXED}[A-Za-z0-9]{{16,24}}\b"),
    ("GOCSPX-", r"[\w\-]{24,}"),
    ("ya29.", rf"{_DIGIT}[\w\-]{{30,}}"),
    ("xapp-", r"\d-[A-Z0-9]{8,}-\d{8,}-[0-9a-f]{32,}"),
    ("xox", rf"[a-eoprs]-(?:\d+-)+{_DIGIT}[A-Za-z0-9]{{16,}}"),
    ("dapi", r"(?=[a-f]*\d)[0-9a-f]{32}\b"),
    ("whsec_", r"(?=[A-Za-z+/]*\d)[A-Za-z0-9+/]{24,}"),
    ("lin_", rf"(?:api|oauth)_{_DIGIT}[A-Za-z0-9]{{32,}}"),
    ("ntn_", rf"{_DIGIT}[A-Za-z0-9]{{40,}}"),
    ("secret_", rf"{_MIXED}[A-Za-z0-9]{{43}}\b"),
    ("pcsk_", rf"{_MIXED}\w{{40,}}"),
    ("PMAK-", r"[0-9a-f]{24}-[0-9a-f]{34}"),
    ("tgp_v1_", rf"{_DIGIT}[\w\-]{{40,}}"),
    ("fw_", rf"{_MIXED}[A-Za-z0-9]{{22,24}}\b"),
    ("jina_", rf"{_DIGIT}[A-Za-z0-9]{{40,}}"),
    ("fc-", r"(?=[a-f]*\d)[0-9a-f]{32}\b"),
    ("e2b_", r"[0-9a-f]{40}\b"),
    ("rpa_", r"(?=[A-Z]*\d)[A-Z0-9]{32}\w*"),
    ("csk-", r"(?=[a-z]*\d)[a-z0-9]{40,}"),
    ("sk-lf-", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    ("sbp_", r"[0-9a-f]{40}\b"),
    ("sb_secret_", rf"{_DIGIT}[\w\-]{{20,}}"),
    ("dckr_", rf"(?:pat|oat)_{_MIXED}[\w\-]{{24,}}"),
    ("pscale_", rf"(?:tkn|pw|oauth)_{_DIGIT}[\w\-.]{{32,}}"),
    ("sntry", rf"[su]_{_DIGIT}[\w+/=]{{40,}}"),
    ("NRAK-", r"[A-Z0-9]{27}\b"),
    ("pul-", r"[0-9a-f]{40}\b"),
    ("rubygems_", r"[0-9a-f]{48}\b"),
    ("sq0", r"(?:atp|csp)-[\w\-]{22,}"),
    ("ATATT3", r"[\w\-=]{100,}"),
    ("dp.", rf"(?:pt|st|ct|sa|scim|audit)\.(?:[\w\-]+\.)?{_MIXED}[A-Za-z0-9]{{40,}}"),
    ("hvs.", rf"{_DIGIT}[\w\-]{{24,}}"),
    ("hvb.", rf"{_DIGIT}[\w\-]{{24,}}"),
    ("AGE-SECRET-KEY-1", r"[A-Z0-9]{58}"),
    ("vb-", r"[0-9a-f]{16}-[\w\-]{16,}"),
    ("eyJ", r"[\w\-]{8,2000}\.[\w\-]{8,}(?:\.[\w\-]*){1,3}"),
)  # fmt: skip
"""Prefix of a token, and the pattern that follows it. Sources: the services' own pages, and keys that they issued."""

_PLACES = (
    ("hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows|triggers)/(?P<value>(?=[\w/]*\d)[\w/]{20,})"),
    ("/webhooks/", r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d{15,}/(?P<value>[\w\-]{40,})"),
    ("webhook.office.com/", r"webhook\.office\.com/webhookb2/(?P<value>[\w\-@/]{60,})"),
    ("hooks.zapier.com/", r"hooks\.zapier\.com/hooks/catch/(?P<value>\d+/\w{5,})"),
    (":AA", r"(?<!\d)(?P<value>\d{8,10}:AA[\w\-]{33})(?![\w\-])"),
    ("sig", r"(?i:(?:[?&]|\\u0026)(?:amp;)?(?:sig|signature)(?:=|%3D))(?P<value>(?=[\w%+/=\-]*\d)[\w%+/=\-]{32,})"),
    ("X-", r"(?i:X-(?:Amz|Goog)-(?:Signature|Security-Token)(?:=|%3D))(?P<value>[\w%+/=.~\-]{32,})"),
    ("x-", r"(?i:x-(?:amz|goog)-(?:signature|security-token)(?:=|%3D))(?P<value>[\w%+/=.~\-]{32,})"),
    ("Q~", r"(?:(?<![\w~.\-])|(?<=\\[nrt]))(?P<value>[\w~.]{3}\dQ~[\w~.\-]{31,34})(?![\w~\-])"),
)  # fmt: skip
"""A substring that must occur, and a pattern whose group `value` is the key, for each of: webhooks, signed URLs, tokens
of Telegram bots, Azure secrets."""

_FORMS = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        *((word, f"{_START}(?P<value>{re.escape(word)}{behind})") for word, behind in _TOKENS),
        *_PLACES,
    )
)


def keys_of_services(text: str) -> Iterator[tuple[int, int]]:
    """The start and end of each service's key in a string. The time taken is linear in the length of the string.

    >>> list(keys_of_services("SG. and xai-grok are none, AKIAIOSFODNN7EXAMPLE is"))
    [(27, 47)]
    """
    for word, form in _FORMS:
        # The substring test is much faster than the pattern, and almost always rules the pattern out.
        if word in text:
            yield from (found.span("value") for found in form.finditer(text))
