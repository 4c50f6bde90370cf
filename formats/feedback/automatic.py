"""Who wrote this: a mail system, somebody's holiday notice, or a person. By header fields first, by words after.

RFC 3834 (Auto-Submitted), RFC 5230 §4.6; the other fields are what vacation programs really set.
"""

from __future__ import annotations

import re

from formats.feedback.mime import Headers

_DAEMON = re.compile(
    r"(?:mailer|mail|maile?r)[-_. ]?(?:daemon|deamon|demon)|p+o+s+t?[-_.]?master|mail(?:er)?[-_. ]?(?:delivery"
    r"|system|admin)|mdaemon"
    r"|system[-_. ]administrator|delivery[-_. ]?(?:subsystem|status|service|failure|notification|agent)"
    r"|bounce[sd]?\b|microsoftexchange[0-9a-f]+"
    r"|no-?reply@sns\.|internet mail (?:delivery|service)|e-?mail interconnect|smtp[-_ ]?server",
    re.I,
)
_FAILURE_SUBJECT = re.compile(
    r"undeliver|undelivered|(?:delivery|mail|message|sending|transmission)\W+(?:\w+\W+){0,3}?(?:fail|problem"
    r"|error|status|notif|report|delay)|returned?\s+(?:mail|to sender)|failure\s+notice"
    r"|delayed\s+mail|could\s+not\s+(?:be\s+)?(?:send|deliver|sent)|mail\s+system\s+error|bounced"
    r"|failed\s+delivery|permanent\s+delivery|non\s?remis|unzustellbar|nicht\s+zustellbar|onbestelbaar"
    r"|non\s+recapitabile"
    r"|no\s+se\s+puede\s+entregar|no\s+entregado|não\s+entregue|échec|fehlgeschlagen|mislukt|недоставлен"
    r"|не\s+доставлен|не\s+может|配信|配達|送信|エラー|退信|退回|전송\s*실패|반송",
    re.I,
)
_HOLIDAY_SUBJECT = re.compile(
    r"^\s*(?:auto(?:matic|matisch\w*|mated)?[\s:_-]*(?:repl|respon|antwort|answer|svar|generated)"
    r"|out\s+of\s+(?:the\s+)?office|ooo\b|away\s+from|on\s+(?:vacation|holiday|leave)|vacation|i\s+am\s+(?:away"
    r"|out|on)|i'm\s+(?:away|out|on)"
    r"|abwesen|automatische\s+antwort|urlaub|bin\s+(?:im\s+urlaub|nicht)|nicht\s+im\s+büro|absen[ct]"
    r"|réponse\s+automatique|reponse\s+automatique|en\s+congé|congés|vacances|respuesta\s+autom"
    r"|fuera\s+de\s+(?:la\s+)?oficina|de\s+vacaciones|ausencia"
    r"|risposta\s+automatica|fuori\s+(?:sede|ufficio)|assente|resposta\s+autom|fora\s+do\s+escrit|ausente|férias"
    r"|automatisch\s+antwoord|automatische\s+beantwoord|afwezig|buiten\s+kantoor|autosvar|automatisk|frånvaro"
    r"|fravær|ferie|poissa"
    r"|automaattinen|automatyczna\s+odpowied|poza\s+biurem|nieobecno|urlop|automatická\s+odpov|mimo\s+kancel"
    r"|automatikus\s+válasz|házon\s+kívül|otomatik\s+yan|ofis\s+dışı|автоответ|автоматический\s+ответ|вне\s+офиса"
    r"|в\s+отпуске|автоматична"
    r"|自動(?:応答|返信|回覆|回复)|不在|休暇|自动(?:答复|回复)|外出|休假|자동\s*(?:회신|응답)|부재\s*중|ตอบกลับอัตโนมัติ|رد\s+تلقائي"
    r"|תשובה\s+אוטומטית|αυτόματη)"
    r"|(?:\[auto-?reply\]|auto-?reply\b|autoreply|out\s+of\s+office|automatic\s+reply|auto-?response)",
    re.I,
)
_HOLIDAY_TEXT = re.compile(
    r"(?:i\s+am|i'm|i\s+will\s+be|we\s+are|is)\s+(?:currently\s+)?(?:out\s+of|away|on\s+(?:vacation|holiday"
    r"|annual|leave|maternity|parental)|not\s+in\s+the\s+office)|out\s+of\s+(?:the\s+)?office"
    r"|limited\s+access\s+to\s+(?:my\s+)?(?:e-?mail)|no\s+longer\s+(?:work|with|employed)"
    r"|(?:thank\s+you|thanks)\s+for\s+(?:your|contacting)[^.\n]{0,60}(?:e-?mail|message|inquiry"
    r"|enquiry)[^\n]{0,200}(?:will\s+(?:respond|reply|get\s+back|be\s+read)|as\s+soon\s+as)"
    r"|this\s+is\s+an\s+automat(?:ic|ed)\s+(?:reply|response)"
    r"|nicht\s+im\s+(?:büro|haus)|im\s+urlaub|außer\s+haus|(?:keinen"
    r"|nur\s+\w+)\s+zugriff\s+auf\s+(?:meine\s+)?e-?mails|wieder\s+(?:im\s+büro|erreichbar|zurück)"
    r"|bis\s+(?:zum\s+)?\d+\.[^\n]{0,40}(?:abwesend|urlaub)"
    r"|(?:je\s+suis|actuellement)\s+(?:\w+\s+)?(?:absent|en\s+congé|en\s+vacances)|de\s+retour\s+le"
    r"|estoy\s+(?:fuera|de\s+vacaciones|ausente)|fuera\s+de\s+la\s+oficina|sono\s+(?:assente|fuori|in\s+ferie)"
    r"|estou\s+(?:ausente|fora|de\s+férias)"
    r"|ik\s+ben\s+(?:\w+\s+)?(?:afwezig|niet\s+aanwezig|met\s+vakantie|op\s+vakantie)"
    r"|jag\s+är\s+(?:\w+\s+)?(?:på\s+semester|bortrest|ledig)|jestem\s+(?:na\s+urlopie|nieobecn)"
    r"|przebywam\s+na\s+urlopie|я\s+(?:нахожусь\s+)?в\s+отпуске|нахожусь\s+в\s+отпуске|отсутствую"
    r"|(?:休暇|不在|外出)(?:中|のため|とさせ)|休み(?:を|中)|正在休假|不在办公室|休假中|외출\s*중|휴가\s*중|부재\s*중",
    re.I,
)
_UNSUBSCRIBE = re.compile(
    r"^\s*(?:re:\s*)?(?:please\s+)?(?:unsubscribe|un-subscribe|opt[ -]?out|remove(?:\s+me)?|list-?unsubscribe"
    r"|abmeld\w*|austragen|abbestell\w*|désabonn\w*|desinscri\w*|désinscri\w*|darse\s+de\s+baja|baja\b"
    r"|cancelar\s+(?:la\s+)?suscripción|disiscri\w*|cancell\w*\s+iscrizione|afmeld\w*|uitschrijv\w*|descadastr\w*"
    r"|avregistr\w*|afmeld\w*|wypisz|rezygn\w*|отпис\w*|配信停止|購読解除|退订|取消订阅|수신\s*거부)",
    re.I,
)


def _address_of(value: str) -> str:
    inside = re.search(r"<([^<>]*)>", value)
    return (inside[1] if inside else value).strip()


def is_from_system(headers: Headers) -> bool:
    """The sender calls itself a mail system, or the envelope sender was null (RFC 5321 §4.5.5)."""
    sender = headers.words("from")
    if _DAEMON.search(sender) or (sender and _address_of(sender) == ""):
        return True
    return "x-failed-recipients" in headers


def has_null_return_path(headers: Headers) -> bool:
    """The envelope sender was null: reports have that, and so have replies made by programs."""
    return "return-path" in headers and _address_of(headers.get("return-path")) == ""


def announces_failure(subject: str) -> bool:
    """The subject is one that notices of failed deliveries have; a reply to such a notice is none."""
    return bool(_FAILURE_SUBJECT.search(subject)) and not re.match(
        r"\s*(?:re|aw|antw|sv|fwd?|wg|tr|rv)\s*:", subject, re.I
    )


def is_automatic_reply(headers: Headers, subject: str, text: str) -> bool:
    """A program answered in somebody's name."""
    submitted = headers.get("auto-submitted").lower()
    if submitted.startswith("auto-replied"):
        return True
    if any(
        name in headers
        for name in ("x-autoreply", "x-autorespond", "x-autoreply-from", "x-autoresponder", "x-vacation")
    ):
        return True
    if "auto_reply" in headers.get("precedence").lower() or "autoreply" in headers.get("x-precedence").lower():
        return True
    if "oof" in headers.get("x-auto-response-suppress").lower() and _HOLIDAY_SUBJECT.search(subject):
        return True
    if (
        "x-ms-exchange-inbox-rules-loop" in headers
        or "out-of-office" in headers.get("x-ms-exchange-generated-message-source").lower()
    ):
        return True
    if _HOLIDAY_SUBJECT.search(subject):
        return True
    is_machine = (
        submitted not in ("", "no") or has_null_return_path(headers) or "bulk" in headers.get("precedence").lower()
    )
    return bool(_HOLIDAY_TEXT.search(text[:4000])) and (is_machine or len(text) < 2000)


def asks_to_unsubscribe(subject: str, text: str) -> bool:
    """The message asks for removal: in its subject, or in a body that says little else."""
    if _UNSUBSCRIBE.match(subject):
        return True
    words = text.strip()
    return len(words) < 120 and bool(_UNSUBSCRIBE.match(words))
