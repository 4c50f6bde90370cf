"""Delivery reports, complaints, automatic replies and requests to unsubscribe: bytes that came back -> `Feedback`."""

from formats.feedback.reader import read_feedback
from formats.feedback.values import Action, Feedback, Kind, Origin, Recipient, Stage

__all__ = ["Action", "Feedback", "Kind", "Origin", "Recipient", "Stage", "read_feedback"]
