"""Analyses by name. Adding one is adding its module, its line in the package's summaries, and its entry here."""

from __future__ import annotations

from collections.abc import Mapping

from flcore.analyses import SUMMARIES
from flcore.analyses.averaged_bodies import averaged_bodies, has_bodies_and_prototypes
from flcore.analyses.base import Analysis, always, keeps_trained_models, needs_global_model
from flcore.analyses.class_heatmap import class_heatmap, class_heatmap_trained
from flcore.analyses.confusion import confusion
from flcore.analyses.generated import (
    can_show_generated,
    generator_distances,
    has_generated_features,
    tsne_generated,
)
from flcore.analyses.gradcam import can_compare_maps, gradcam_cases
from flcore.analyses.inversion import inversion, inversion_search
from flcore.analyses.shown import can_show, can_show_trained
from flcore.analyses.tsne import has_projections, tsne, tsne_projections, tsne_trained
from flcore.analyses.tsne_calibration import (
    can_show_calibration,
    can_show_calibration_trained,
    tsne_calibration,
    tsne_calibration_trained,
)
from flcore.analyses.tsne_prototypes import tsne_prototypes
from flcore.analyses.virtual_sheet import has_virtual_images, virtual_sheet

ANALYSES: Mapping[str, Analysis] = {
    name: Analysis(SUMMARIES[name], compute, applies)
    for name, compute, applies in (
        ("class_heatmap", class_heatmap, always),
        ("class_heatmap_trained", class_heatmap_trained, keeps_trained_models),
        ("confusion", confusion, always),
        ("averaged_bodies", averaged_bodies, has_bodies_and_prototypes),
        ("tsne", tsne, can_show),
        ("tsne_trained", tsne_trained, can_show_trained),
        ("tsne_projections", tsne_projections, has_projections),
        ("tsne_calibration", tsne_calibration, can_show_calibration),
        ("tsne_calibration_trained", tsne_calibration_trained, can_show_calibration_trained),
        ("tsne_prototypes", tsne_prototypes, always),
        ("tsne_generated", tsne_generated, can_show_generated),
        ("virtual_images", virtual_sheet, has_virtual_images),
        ("generator_distances", generator_distances, has_generated_features),
        ("inversion", inversion, needs_global_model),
        ("inversion_search", inversion_search, needs_global_model),
        ("gradcam", gradcam_cases, can_compare_maps),
    )
}
