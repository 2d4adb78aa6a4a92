{{- define "quotient.labels" -}}
app.kubernetes.io/name: quotient
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: quotient
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "quotient.selector" -}}
app.kubernetes.io/name: quotient
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The configuration file of all components: .Values.config, with what the release determines. */}}
{{- define "quotient.configuration" -}}
{{- if has .Release.Namespace (list "default" "kube-system" "kube-public" "kube-node-lease") -}}
{{- /* Admission skips the release's namespace, so other pods in it would not be checked. */ -}}
{{- fail (printf "--namespace %s: not allowed, because Quotient's namespace is exempt from admission; use a separate one, as quotient-system" .Release.Namespace) -}}
{{- end -}}
{{- if hasKey .Values.config "systemNamespace" -}}
{{- fail "config.systemNamespace: not allowed, it is the namespace of the release; set it with helm install --namespace" -}}
{{- end -}}
{{- if dig "certificates" "manage" "" .Values.config | toString -}}
{{- fail "config.certificates.manage: not allowed; set certificates.mode instead" -}}
{{- end -}}
{{- $own := dict "apiVersion" "quotient.dev/v1" "kind" "Configuration" "systemNamespace" .Release.Namespace -}}
{{- $managed := dict "certificates" (dict "manage" (eq .Values.certificates.mode "self")) -}}
{{- $callers := dict -}}
{{- if .Values.webhook.clientCa -}}
{{- $callers = dict "webhook" (dict "clientCa" (printf "%s/ca.crt" (include "quotient.clientCa" .))) -}}
{{- end -}}
{{- toYaml (mergeOverwrite (dict) $managed (deepCopy .Values.config) $callers $own) -}}
{{- end }}

{{- define "quotient.domain" -}}
{{ dig "domain" "inspur.com" .Values.config }}
{{- end }}

{{- define "quotient.hami" -}}
{{ if dig "vocabularies" "hami" false .Values.config }}yes{{ end }}
{{- end }}

{{- define "quotient.nvidiaGpu" -}}
{{ if or (dig "vocabularies" "nvidiaGpu" false .Values.config) (dig "vocabularies" "hami" false .Values.config) }}yes{{ end }}
{{- end }}

{{/* Keeps the live failurePolicy in an upgrade. A new configuration has Ignore until the controller sees that the API
     server reaches the webhook, and sets Fail. */}}
{{- define "quotient.failurePolicy" -}}
{{- $live := lookup "admissionregistration.k8s.io/v1" .kind "" "quotient" -}}
{{- if and $live $live.webhooks (eq .root.Values.webhook.arm "auto") -}}
{{- (index $live.webhooks 0).failurePolicy | default "Ignore" -}}
{{- else -}}
Ignore
{{- end -}}
{{- end }}

{{/* The path of a live webhook configuration, if this release has to render it. The controller writes the path, with a
     secret, and replaces it often; nothing else may reset it, so it is not rendered. But versions without secrets rendered
     a plain one, and Helm deletes what an earlier release has rendered and a later one does not: after an upgrade from
     such a version, all releases render what is live at the moment. The annotation tells them. */}}
{{- define "quotient.keptPath" -}}
{{- $live := lookup "admissionregistration.k8s.io/v1" . "" "quotient" | default dict -}}
{{- $path := dig "clientConfig" "service" "path" "" (first ($live.webhooks | default list) | default dict) -}}
{{- if or (has $path (list "/mutate" "/validate")) (dig "metadata" "annotations" "quotient.dev/path-rendered" "" $live) -}}
{{- $path -}}
{{- end -}}
{{- end }}

{{- define "quotient.path" -}}
{{- with include "quotient.keptPath" . -}}
path: {{ . }}
{{- end -}}
{{- end }}

{{/* Where the CA of API servers' client certificates is mounted. */}}
{{- define "quotient.clientCa" -}}
/etc/quotient/client-ca
{{- end }}

{{/* The addresses of the API servers for the NetworkPolicy. */}}
{{- define "quotient.apiServerCidrs" -}}
{{- toYaml (.Values.networkPolicy.apiServerCidrs | default (dig "webhook" "apiServerCidrs" list .Values.config)) -}}
{{- end }}

{{- define "quotient.registrationAnnotations" -}}
{{- $live := lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "quotient" }}
{{- /* `quotient disarm` outlasts an upgrade, until `quotient arm`. */}}
quotient.dev/arm: {{ if eq (dig "metadata" "annotations" "quotient.dev/arm" "" ($live | default dict)) "never" }}never{{ else }}{{ .Values.webhook.arm }}{{ end }}
{{- if include "quotient.keptPath" "MutatingWebhookConfiguration" }}
quotient.dev/path-rendered: "true"
{{- end }}
{{- if eq .Values.certificates.mode "cert-manager" }}
cert-manager.io/inject-ca-from: {{ .Release.Namespace }}/quotient-webhook
{{- end }}
{{- end }}

{{- define "quotient.tlsSecret" -}}
{{- if eq .Values.certificates.mode "provided" -}}
{{- required "certificates.secretName: required with certificates.mode=provided; set it to the Secret with tls.crt and tls.key" .Values.certificates.secretName -}}
{{- else -}}
quotient-webhook-tls
{{- end -}}
{{- end }}

{{/* The Secret with the certificate of the node plugins' monitor and the CA to trust (ca.crt); empty: TLS is not served. */}}
{{- define "quotient.monitorTlsSecret" -}}
{{- if eq .Values.certificates.mode "provided" -}}
{{- .Values.certificates.nodePluginSecretName -}}
{{- else -}}
quotient-nodeplugin-tls
{{- end -}}
{{- end }}

{{- define "quotient.monitorServerName" -}}
gpu-manager-metric.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "quotient.monitorFolder" -}}
{{ dig "monitor" "certificates" "/etc/quotient/monitor-tls" .Values.config }}
{{- end }}

{{- define "quotient.subjects" -}}
{{- range . }}
- {kind: {{ .kind }}, name: {{ .name | quote }}{{ if eq .kind "ServiceAccount" }}, namespace: {{ .namespace }}{{ else }}, apiGroup: rbac.authorization.k8s.io{{ end }}}
{{- end }}
{{- end }}

{{- define "quotient.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
{{- .Values.priorityClass.name | default "quotient-critical" -}}
{{- else -}}
{{- .Values.priorityClass.name -}}
{{- end -}}
{{- end }}

{{- define "quotient.image" -}}
{{ required "image: required; build one (README, Install) and set it with --set image=REGISTRY/quotient:TAG" .Values.image }}
{{- end }}

{{- define "quotient.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "quotient.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "quotient.env" -}}
- {name: QUOTIENT_CONFIG, value: /etc/quotient/configuration.yaml}
- {name: QUOTIENT_LOG_FORMAT, value: json}
{{- with include "quotient.apiServerEnv" . }}
{{ . }}
{{- end }}
{{- end }}

{{- define "quotient.apiServerEnv" -}}
{{- with .Values.kubernetesService.host -}}
- {name: KUBERNETES_SERVICE_HOST, value: {{ . | quote }}}
{{- end }}
{{- with .Values.kubernetesService.port }}
- {name: KUBERNETES_SERVICE_PORT, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "quotient.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: ops}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: ops}
  periodSeconds: 10
  failureThreshold: 6
  timeoutSeconds: 5
  # A process that hangs does not react to signals either.
  terminationGracePeriodSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: ops}
  periodSeconds: 2
  failureThreshold: 2
  timeoutSeconds: 5
{{- end }}

{{- define "quotient.caBundle" -}}
{{- if eq .Values.certificates.mode "provided" -}}
caBundle: {{ required "certificates.caBundle: required with certificates.mode=provided; set it to the CA in PEM" .Values.certificates.caBundle | b64enc }}
{{- end -}}
{{- end }}

{{/* The same as kube_scheduler_configuration in scheduler/kube_scheduler.py; a test compares the two. */}}
{{- define "quotient.kubeSchedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceName: quotient-scheduler
  resourceNamespace: {{ .Release.Namespace }}
clientConnection: {qps: 300, burst: 600}
profiles:
  - schedulerName: quotient-scheduler
# All nodes are ranked: with fewer, the best one may be missed.
percentageOfNodesToScore: 100
podInitialBackoffSeconds: {{ dig "scheduler" "initialBackoffS" 1 .Values.config }}
podMaxBackoffSeconds: {{ dig "scheduler" "maxBackoffS" 60 .Values.config }}
extenders:
  - urlPrefix: http://127.0.0.1:{{ dig "scheduler" "port" 3456 .Values.config }}/scheduler
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    weight: 1000
    nodeCacheCapable: true
    # An ignorable extender that fails would have its pods bound without a placement.
    ignorable: false
    httpTimeout: 30s
    managedResources:
      - {name: {{ include "quotient.domain" . }}/vcuda-core, ignoredByScheduler: false}
      - {name: {{ include "quotient.domain" . }}/vcuda-memory, ignoredByScheduler: false}
{{- end }}

{{/* The release of a Kubernetes version, without what vendors append: v1.31.4 of v1.31.4-eks-abc. */}}
{{- define "quotient.kubernetesRelease" -}}
{{ regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" . }}
{{- end }}

{{/* The tag of kube-scheduler's image. Helm's own idea of the version is used only if it comes from the cluster. */}}
{{- define "quotient.kubeSchedulerTag" -}}
{{- $version := "" -}}
{{- if lookup "v1" "Namespace" "" "default" -}}
{{- $version = .Capabilities.KubeVersion.Version -}}
{{- end -}}
{{- $tag := .Values.scheduler.kubeScheduler.tag | default (include "quotient.kubernetesRelease" $version) -}}
{{- include "quotient.checkVersionSkew" (dict "tag" $tag "version" $version) -}}
{{- required "scheduler.kubeScheduler.tag: required, because the cluster's version is not known here; set it to the version that `kubectl version` shows for the server, as in v1.36.4" $tag -}}
{{- end }}

{{/* Kubernetes' version skew policy: kube-scheduler is not newer than the API server, and at most one minor older. */}}
{{- define "quotient.checkVersionSkew" -}}
{{- $minor := "^v?1\\.([0-9]+)([^0-9].*)?$" -}}
{{- if and (regexMatch $minor .tag) (regexMatch $minor .version) -}}
{{- $own := regexReplaceAll $minor .tag "${1}" | int -}}
{{- $server := regexReplaceAll $minor .version "${1}" | int -}}
{{- if or (gt $own $server) (lt (add1 $own) (int64 $server)) -}}
{{- fail (printf "scheduler.kubeScheduler.tag: %s does not work with an API server of version %s; use the same minor version, or the one before, or no tag" .tag .version) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* From 1.33 on kube-scheduler skips the backoff of pods while it is idle: pods that fit nowhere would be filtered
     without pause. Older versions do not know the feature gate, nor may a later one; a tag that is no version gets none. */}}
{{- define "quotient.popFromBackoff" -}}
{{- $tag := include "quotient.kubeSchedulerTag" . -}}
{{- if regexMatch "^v?1\\.(3[3-7])\\." $tag -}}
--feature-gates=SchedulerPopFromBackoffQ=false
{{- end -}}
{{- end }}
