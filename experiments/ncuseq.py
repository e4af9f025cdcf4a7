import pickle, sys
o=pickle.load(open(sys.argv[1],"rb")); thr=float(sys.argv[2])
lo=int(sys.argv[3]) if len(sys.argv)>3 else 0; hi=int(sys.argv[4]) if len(sys.argv)>4 else 10**9
tot=sum(x[0] for x in o); acc=0
for i,(t,d,st,ins,ex) in enumerate(o):
    if i<lo or i>=hi: continue
    acc+=t
    if 100*t/tot>=thr:
        top=max(d.items(), key=lambda kv:kv[1])
        chain=">".join(f"{a[:-4]}:{b}" for a,b,_,_ in st[:5])
        print(f"{i:5d} {100*t/tot:5.2f} acc {100*acc/tot:5.2f} ex {ex/100/128:8.2f}/tok/cta {top[0][6:]:10s} {ins[:60]:60s} {chain}")
