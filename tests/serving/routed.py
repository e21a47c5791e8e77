"""The recorder for a target that routes by sigmoid scores, to which the engine's CPU build is helped."""

from tests.serving.recorder import Recorder
from tests.support.cpu_routing import SigmoidRouting


class RoutedRecorder(Recorder, SigmoidRouting):
    """Becomes a base of the worker's class."""
