"""The text reader: failed recipients from the words of reports that have no fields.

There is no standard for these, but there is a grammar. Every such report has an introduction ("could not be delivered",
in the host's language), then one or more recipients at places that software chooses and people do not: alone on a
line, at the head of a paragraph, behind a label, inside a quoted SMTP dialogue; then what the remote host said; then
the returned message behind a marker. The reader looks for these places, surest first, and takes the whole of the first
kind that yields anything. It knows no host by name.
"""

from __future__ import annotations

import re

from formats.feedback.smtpwords import ADDRESS, addresses_in, enhanced_in, fold, reply_in, squeezed, stage_in, tidy
from formats.feedback.values import NO_REPLY, Action, Origin, Recipient, Stage

MAX_RECIPIENTS = 200
MAX_TEXT = 64 * 1024  # a notice is short; what follows is the returned message
_MAX_LINE = 2000

# Where the returned message begins. The words differ, the shape (a rule of dashes, a sentence with a colon) does not.
_RETURNED = re.compile(
    r"""^[ \t]*(?:
        [-=_*]{2,}[ ]?(?:this\ is\ a\ copy|original\ (?:message|mail)|the\ header\ of\ the\ orig|below\ this\ line|
            returned\ (?:message|mail)|unsent\ message|message\ header|undelivered\ message|the\ body\ of|
            enclosed\ (?:is|are)|headers?\ of\ the\ orig|attached\ message|a\ copy\ of|forwarded\ message|
            ursprüngliche\ nachricht|message\ d'origine|mensaje\ original)
      | (?:message|mail)\ headers?\ follow
      | (?:the\ )?original\ (?:message|mail)\ (?:follows|headers?\b|as\ follows|text)
      | below\ is\ a\ copy\ of\ the\ original
      | included\ is\ a\ copy\ of\ the\ (?:message|mail)
      | (?:the\ )?(?:text|header)s?\ of\ the\ (?:original\ )?message\ (?:follow|is\b)
      | received:\s?(?:\(|from\b|by\b)
      | return-path:\s
      | (?:[-=_]{3,}\ ?)?(?:以下は|下記は|元のメッセージ|原文|送信メール)
    )""",
    re.I | re.X | re.M,
)

# "Could not be delivered", in words: what makes a text a notice. Several languages, the phrases their hosts use.
_INTRODUCTION = re.compile(
    r"""
      (?:could|can|was|were|is|are|has|have|been|able|unable|wasn't|couldn't|cannot|not|
        impossible)\W[^.:\n]{0,80}?(?:be\ )?(?:deliver|sent\b|reach|transmit)
    | unable\s+to\s+(?:[\w\s]{0,20})?(?:deliver|send|relay|contact|connect)
    | did\s+not\s+reach | not\s+(?:been\s+)?delivered | undeliver(?:able|ed) | non-?deliver
    | (?:following|these|this)\s+(?:addres|recipient|user)[^.\n]{0,40}(?:fail|had|has|error|reject|problem|did\ not)
    | deliver[a-z]*\s+(?:to|of|has|have|was|for|attempt|status|notification|failure|error|problem|
      report)[^.\n]{0,80}(?:fail|abort|delay|error|problem|unsuccessful|reject|expired|not)
    | (?:delivery|mail|message|transmission|sending)\s+(?:[a-z]+\s+){0,2}(?:has\s+|have\s+)?fail
    | (?:error|problem)s?\s+(?:occurred|occured|was|were|while|delivering|when|sending|has)
    | returned\s+(?:mail|to\s+sender) | transcript\s+of\s+(?:the\s+)?session | failure\s+(?:notice|reason|notification)
    | (?:has|have|been)\s+(?:been\s+)?(?:delayed|rejected|bounced|refused|blocked)
    | (?:rejected|refused)\s+by | invalid\s+(?:final\s+delivery|user|recipient|address) |
      contained\s+one\s+or\s+more\s+recipient\s+addresses
    | you\s+(?:are|were)\s+not\s+(?:a\s+)?(?:member|allowed|subscribed) | not\s+(?:a\s+)?member\s+of |
      duplicated\s+message-id
    | permission\s+to\s+post | mailbox\s+(?:is\s+)?full | quota\s+exceeded | over\s+quota
    | [5]\d\d[ ]5\.\d{1,2}\.\d{1,3}
    # de, nl, sv, da, no
    | (?:nicht|konnte\s+nicht)\s+(?:zugestellt|zustellbar|[^.\n]{0,30}zugestellt) | unzustellbar |
      zustell\w*\s*(?:fehl|gescheitert)
    | niet\s+(?:worden\s+)?(?:bezorgd|afgeleverd|aankomen) | onbestelbaar | kunde?\s+(?:inte|
      ikke)\s+[^.\n]{0,20}(?:lever|sendes|skickas)
    # fr, it, es, pt, ro
    | n'a\s+pas\s+(?:pu|été)\s+[^.\n]{0,30}(?:remis|délivré|distribu|livré|envoyé|achemin) | non\s+(?:remis|
      distribu|délivré)|échec\s+de\s+(?:la\s+)?(?:remise|livraison|distribution|l'envoi)
    | impossible\s+de\s+(?:remettre|délivrer|distribuer)
    | non\s+(?:è\s+stato|può|è)\s+[^.\n]{0,30}(?:consegn|recapit|inviat) | mancat[ao]\s+(?:recapito|consegna)
    | no\s+(?:se\s+)?(?:pudo|ha\s+podido|puede|fue\s+posible)\s+[^.\n]{0,30}(?:entreg|envi) | no\s+entregad |
      error\s+(?:de|al)\s+(?:entrega|enviar)
    | não\s+(?:pôde|foi|pode)\s+[^.\n]{0,40}(?:entreg|envi)
    # pl, cs, ru, uk, el, tr, hu
    | nie\s+(?:mo[żz]na|została?|może|udało)\s+[^.\n]{0,40}dostarcz | nelze\s+doruč |
      nebyl[ao]?\s+(?:možné\s+)?[^.\n]{0,20}doruč | nedoručiteln
    | не\s+(?:может\s+быть|был[оаи]?|удалось|могло)\s+[^.\n]{0,40}(?:доставлен|доставить|отправлен) | недоставленн
    | δεν\s+(?:ήταν|μπόρεσε|παραδόθηκε) | (?:teslim\s+edilemedi|iletilemedi|gönderilemedi) | nem\s+(?:lehetett|
      sikerült)\s+[^.\n]{0,20}kézbes
    # ja, zh, ko
    | (?:送信|配信|配達|お届け|送達|到達|転送)\S{0,12}(?:でき|出来|失敗|エラー|不能)
    | 宛先 | あて先 | 配送不能 | 失敗しました
    | (?:无法|無法|未能)\S{0,8}(?:投递|傳送|送达|送達|发送|發送|传送|投遞)
    | 退信 | 被退回 | (?:전송|전달|배달)\S{0,8}(?:못|실패|수\s?없)
    """,
    re.I | re.X,
)

_DELAYED = re.compile(
    r"""warning\s+(?:message\s+)?only | will\s+be\s+retried | has\s+been\s+delayed | is\s+delayed\s+for | delayed\s+mail
    | still\s+(?:being\s+retried|trying|undelivered) | will\s+(?:keep|continue)\s+(?:trying|to\s+try) |
      temporary\s+failure\s+report
    | not\s+yet\s+been\s+delivered | do\s+not\s+need\s+to\s+re-?send | delivery\s+attempts\s+will\s+continue |
      message\s+delayed
    | verzögert | en\s+attente\s+de\s+remise | demorado | 遅延 """,
    re.I | re.X,
)
_GIVEN_UP = re.compile(
    r"permanent(?:\s+(?:fatal\s+)?(?:error|failure))|failed\s+permanently|giv(?:en|ing)\s+up|not\s+going\s+to\s+try"
    r"|no\s+further\s+delivery\s+attempts|permanently",
    re.I,
)

_LED = re.compile(
    rf"""^[ \t]*(?:[>*\#|•·+-]{{1,4}}[ \t]*)?(?:\d{{1,3}}[.)][ \t]+)?
    (?P<open>[<"'(\[]{{0,2}}(?:mailto:|smtp:|rfc822;[ ]?)?)(?P<address>{ADDRESS})(?P<close>[>"')\]]{{0,2}})
    (?P<rest>[ \t]*(?:$|[:;,(\[<\-.|=][^\n]*|[ \t][^\n]*))""",
    re.X,
)
_DISPLAYED = re.compile(rf"\s*<({ADDRESS})>")
_FOLLOWS_ADDRESS = re.compile(
    r"\s*(?:[:;(\[<|=-]|\.\.\.|,?\s*(?:\d{3}\b|error|invalid|unknown|user|fail|reject|because|on\s+\w{3},|is\b|was\b"
    r"|has\b|not?\b|could|cannot))|\s*$",
    re.I,
)

_LABELLED = re.compile(
    rf"""(?:^|[\s>(:;])(?P<label>
        (?:failed\ |final\ |original\ |invalid\ |
          intended\ )?recipients?(?:'s)?(?:\ (?:e-?mail\ )?address(?:es)?)?(?:\(s\))?
      | rcpt[ ]to | rcpt | addressed\ to | undeliverable\ (?:message\ )?to |
        (?:re)?deliver\w*\ (?:(?:of\ )?(?:the\ |your\ )?(?:message|mail|e-?mail)\ )?(?:to|for)
      | (?:sent|sending|send|message|mail|e-?mail|forwarded|delivery|transmitted|write|writing|
        wrote)\ to(?:\ the\ (?:following\ )?(?:address|recipient|user))? | delivery\ userid
      | failed(?:\ after)?\ \d+\ attempts? | (?:e-?mail\ )?address(?:ee)? | mailbox | user(?:name|id)? | account |
        mailing\ list | message-id\ in
      | smtp | receiver(?:'s)?(?: address)? | destinatario | destinataire | destinatário | empfänger(?:adresse)? |
        ontvanger | odbiorca | mottagare | получател[ьюя] | адрес(?:ат)?
      | 宛先 | あて先 | 送信先 | 收件人 | 수신자 | to | an | à | para
    )(?=[\s:：=<"'(\[])[ \t]*(?:[:：=]|\ is\b)?[ \t]*["'<(\[]{{0,2}}(?:mailto:)?(?P<address>{ADDRESS})""",
    re.I | re.X,
)
_REPLY_LINE = re.compile(r"^[ \t]*(?:<{3}[ \t]*|[A-Za-z0-9 .:]{0,40}said:[ \t]*)?[45]\d\d[ \-:]", re.M)
_REPLY_TO = re.compile(rf"[^\n]{{0,60}}?[45]\d\d\S*\s+(?:[45]\.\d+\.\d+\s+)?[<\"]?({ADDRESS})")
_BEGINS_DIALOGUE = re.compile(r"\s*(?:>>>|(?:\.\.\. ?)?while talking to)", re.I)
_ANSWER = re.compile(r"\s*(<<<|\w{0,10}\s?>>>)?\s*[245]\d\d[ -]")
_GENERATED = re.compile(
    r"generated (?:from|by)|expanded from|originally|on behalf of|contact|questions|assistance|envelope[- ]from"
    r"|^\s*from\b|mail from|sender|postmaster at",
    re.I,
)


class Notice:
    """A text that may be a notice, cut off before the returned message."""

    def __init__(self, text: str) -> None:
        text = text[:MAX_TEXT]
        found = _RETURNED.search(text)
        # A marker on the first line introduces nothing: then the notice itself is what is quoted.
        end = found.start() if found and text[: found.start()].strip() else len(text)
        self.words = text[:end]
        self.returned = text[end:]
        intro = _INTRODUCTION.search(self.words)
        self.introduction = intro.start() if intro else -1

    @property
    def is_plausible(self) -> bool:
        """It says that something was not delivered."""
        return self.introduction >= 0

    @property
    def is_delay(self) -> bool:
        """It says that the host is still trying."""
        return bool(_DELAYED.search(self.words)) and not _GIVEN_UP.search(self.words)


def is_delay(text: str) -> bool:
    """Whether a subject or a text announces a delay."""
    return bool(_DELAYED.search(text)) and not _GIVEN_UP.search(text)


def read_notice(
    notice: Notice, *, ours: frozenset[str], returned_to: tuple[str, ...], named: tuple[str, ...]
) -> list[Recipient]:
    """The recipients a notice names, empty where it names none.

    `ours` are folded addresses that are likely the sender's own: taken only where nothing else is found. `named` come
    from a header made for it (X-Failed-Recipients), `returned_to` from the returned message's To.
    """
    action = Action.DELAYED if notice.is_delay else Action.FAILED
    for places in (_introduced, _led, _dialogue, _labelled, _alone):
        found = places(notice)
        chosen = [place for place in found if fold(place[0]) not in ours]
        if not chosen and not named and places is not _introduced:
            chosen = found
        if chosen and places is not _led and named:
            chosen = [place for place in chosen if fold(place[0]) in {fold(name) for name in named}]
        if places is _alone and len({fold(place[0]) for place in chosen} - ours) != 1:
            continue
        if chosen and places is _labelled:
            # Labels are the weakest sign: where the returned message confirms some, the others are talk.
            confirmed = [place for place in chosen if fold(place[0]) in {fold(to) for to in returned_to}]
            chosen = confirmed or chosen[:1]
        if chosen:
            return [
                _recipient(address, words, action, Origin.TEXT) for address, words in _once(chosen)[:MAX_RECIPIENTS]
            ]
    if named:
        return [_recipient(name, notice.words, action, Origin.HEADER) for name in named[:MAX_RECIPIENTS]]
    mentioned = {fold(address) for address in addresses_in(notice.words)} - ours
    seen = [to for to in returned_to if fold(to) in mentioned]
    if seen:
        return [_recipient(to, notice.words, action, Origin.GUESS) for to in seen[:MAX_RECIPIENTS]]
    return []


def from_returned(notice: Notice, returned_to: tuple[str, ...]) -> list[Recipient]:
    """The recipient as the returned message has it, where the notice names nobody and only one was written to."""
    if len(returned_to) != 1:
        return []
    action = Action.DELAYED if notice.is_delay else Action.FAILED
    return [_recipient(returned_to[0], notice.words, action, Origin.RETURNED)]


def _once(places: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each address once, with the words that say most: a bilingual notice names everybody twice."""
    seen: dict[str, tuple[str, str]] = {}
    for address, words in places:
        key = fold(address)
        if key not in seen or (not reply_in(seen[key][1]).code and reply_in(words).code):
            seen[key] = (seen[key][0] if key in seen else address, words)
    return list(seen.values())


def _introduced(notice: Notice) -> list[tuple[str, str]]:
    """The address that the introducing sentence itself names: "could not be delivered to <address>"."""
    if notice.introduction < 0:
        return []
    start = notice.words.rfind("\n", 0, notice.introduction) + 1
    end = notice.words.find("\n", notice.introduction)
    line = notice.words[start : end if end >= 0 else len(notice.words)][:_MAX_LINE]
    if "@" not in line or _LED.match(line):
        return []
    places = []
    for found in _LABELLED.finditer(line):
        if not _GENERATED.search(line[: found.start("address")][-40:]):
            places.append((tidy(found["address"]), notice.words[start:]))
    return places[:1]


def _led(notice: Notice) -> list[tuple[str, str]]:
    """Addresses at the head of a line behind the introduction, each with the lines up to the next."""
    places: list[tuple[str, int, int]] = []
    at = 0
    for line in notice.words.split("\n"):
        start, at = at, at + len(line) + 1
        if "@" not in line or (notice.introduction >= 0 and at <= notice.introduction) or len(line) > _MAX_LINE:
            continue
        found = _LED.match(line)
        if found is None or not _FOLLOWS_ADDRESS.match(found["rest"]):
            continue
        address, rest = tidy(found["address"]), found["rest"]
        displayed = _DISPLAYED.match(rest)
        if displayed:  # `kijitora@example.org <kijitora@example.org>`: the path counts, not the name before it
            address = tidy(displayed[1])
        places.append((address, start, start + found.end("close")))
    if not places:
        return []
    result = []
    # Continuation lines inside a reply begin with the address as well: they belong to the recipient above.
    merged: list[tuple[str, int, int]] = []
    for place in places:
        if merged and fold(merged[-1][0]) == fold(place[0]) and "\n\n" not in notice.words[merged[-1][2] : place[1]]:
            continue
        merged.append(place)
    for number, (address, _start, end) in enumerate(merged):
        until = merged[number + 1][1] if number + 1 < len(merged) else len(notice.words)
        result.append((address, notice.words[end:until]))
    preface = notice.words[max(0, notice.introduction) : merged[0][1]]
    if reply_in(preface).code and not any(reply_in(words).code for _, words in result):
        # "Could not be delivered because of / 550 5.1.1 ... / The following recipients were affected:"
        return [(address, f"{preface}\n{words}") for address, words in result]
    # An indented list: lines that stand further left or are a plain mention in prose are not part of it.
    if all(len(words.strip()) == 0 for _, words in result[:-1]) and len(result) > 1:
        shared = result[-1][1]
        transcript = _by_address(notice, [address for address, _ in result])
        return [(address, transcript.get(fold(address), "") or shared or notice.words) for address, _ in result]
    if len(result) == 1 and not result[0][1].strip():
        return [(result[0][0], notice.words)]
    return result


def _by_address(notice: Notice, addresses: list[str]) -> dict[str, str]:
    """The transcript's lines that name an address, joined."""
    wanted = {fold(address) for address in addresses}
    lines: dict[str, list[str]] = {}
    for line in notice.words.split("\n"):
        if "@" in line and len(line) <= _MAX_LINE and _REPLY_LINE.match(line):
            for address in addresses_in(line, 5):
                if fold(address) in wanted:
                    lines.setdefault(fold(address), []).append(line)
    return {address: "\n".join(found) for address, found in lines.items()}


def _dialogue(notice: Notice) -> list[tuple[str, str]]:
    """Addresses inside a quoted dialogue: RCPT TO and the replies that name a recipient."""
    names: dict[str, str] = {}
    words: dict[str, list[str]] = {}
    before: list[str] = []  # what led to the next reply that names a recipient
    answering = ""
    for line in notice.words.split("\n"):
        if len(line) > _MAX_LINE:
            continue
        if answering and (answer := _ANSWER.match(line)):
            words[answering].append(line)
            if answer[1] is None:  # a bare reply answers once, what follows is the reporting host's own
                answering = ""
            continue
        if _BEGINS_DIALOGUE.match(line):
            before = []
        before.append(line)
        address, is_command = _recipient_of(line)
        answering = fold(address) if is_command else ""
        if address:
            key = fold(address)
            names.setdefault(key, address)
            words.setdefault(key, []).extend(before)
            before = []
    return [(names[key], "\n".join(lines)) for key, lines in words.items()]


def _recipient_of(line: str) -> tuple[str, bool]:
    """The recipient that one line of a dialogue is about, and whether the line is the command that names it."""
    lowered = line.lower()
    if "@" not in line or "mail from" in lowered:
        return "", False
    at = lowered.find("rcpt to")
    if at >= 0:
        found = addresses_in(line[at:], 1)
        return (found[0], True) if found else ("", False)
    if _REPLY_LINE.match(line) and not _GENERATED.search(line):
        named = _REPLY_TO.match(line)
        return (tidy(named[1]), False) if named else ("", False)
    return "", False


def _alone(notice: Notice) -> list[tuple[str, str]]:
    """The only address of a short notice, behind a colon or in brackets: `User mailbox exceeds allowed size: a@b`."""
    found = addresses_in(notice.words[:8000], 12)
    return [(address, notice.words) for address in found if re.search(rf"[:<(\[]\s?{re.escape(address)}", notice.words)]


def _labelled(notice: Notice) -> list[tuple[str, str]]:
    """Addresses behind a word for recipient or destination."""
    places: list[tuple[str, int]] = []
    text = notice.words
    at = 0
    for line in text.split("\n"):
        start, at = at, at + len(line) + 1
        if "@" not in line or len(line) > _MAX_LINE:
            continue
        for found in _LABELLED.finditer(line):
            if _GENERATED.search(line[max(0, found.start() - 30) : found.start("address")]):
                continue
            places.append((tidy(found["address"]), start))
    strong = [place for place in places if place[1] >= notice.introduction - 200]
    if len({fold(address) for address, _ in strong}) == 1:
        return [(strong[0][0], text)]
    return [
        (
            address,
            text[start : strong[number + 1][1]]
            if number + 1 < len(strong) and strong[number + 1][1] > start
            else text[start:],
        )
        for number, (address, start) in enumerate(strong)
    ]


def _recipient(address: str, words: str, action: Action, origin: Origin) -> Recipient:
    reply = reply_in(words)
    return Recipient(
        address=address[:320],
        action=action,
        status=enhanced_in(words),
        reply=reply if reply.code else NO_REPLY,
        diagnostic=squeezed(words.strip(" \t\n:;,.-")),
        stage=stage_in(words) or Stage.NONE,
        origin=origin,
    )
